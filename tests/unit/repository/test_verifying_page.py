"""docs/verifying.md against the code: rules, verdicts, kinds, exit codes, and its example of a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

from harness.source_tree import ROOT
from unison.workers.trainer.audit import RULES
from unison.workers.verify.case import CaseFile
from unison.workers.verify.cli import verify
from unison.workers.verify.report import EXIT_DIFFERENT, EXIT_UNVERIFIABLE
from unison.workers.verify.verdict import KINDS, Verdict

PAGE = (ROOT / "docs/verifying.md").read_text(encoding="utf-8")


def rows(head: str) -> dict[str, str]:
    """First and second cells of the table whose header begins so."""
    table = PAGE.split(f"| {head} |", 1)[1].split("\n\n", 1)[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
    return {line[0].strip("` "): line[1].strip("` ") for line in cells}


def test_the_tables_are_the_codes() -> None:
    """Rules of the audit and kinds of differences in their words, verdicts and exit codes by name."""
    assert rows("rule") == RULES and rows("what differs") == KINDS
    assert list(rows("verdict")) == [verdict.value for verdict in Verdict]
    assert list(rows("exit code")) == ["0", str(EXIT_DIFFERENT), str(EXIT_UNVERIFIABLE)]


def test_every_option_that_is_named_is_there() -> None:
    """Options of bin/verify on the page are options of the command."""
    known = {option for parameter in verify.params for option in parameter.opts}
    named = set(re.findall(r"`(--[a-z-]+)", PAGE.split("## The samples")[1]))
    assert named <= known and {"--all", "--order", "--step", "--sample", "--no-rewards"} <= named


def test_the_example_is_read(tmp_path: Path) -> None:
    """The page's file is of the form that is read, as it stands there."""
    (example,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "sample.json").write_text(example)
    found = CaseFile.read(tmp_path / "sample.json")
    assert found.model == tmp_path / "models/smollm2-135m" and found.sources == (tmp_path / "runs/add",)
    (case,) = found.cases
    assert case.params.seed == 7 and case.samples[0].span_problem(len(case.prompt_ids)) is None
    assert json.loads(example)["versions"] == {str(ordinal): digest for ordinal, digest in case.digests.items()}
