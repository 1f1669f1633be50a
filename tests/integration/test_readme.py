"""The newcomer's path: what README tells a reader to run is run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.source_tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_prints_eight_samples(tmp_path: Path, model_dir: Path) -> None:
    """The Python block, in a folder where the model lies at the path that the command before it names."""
    (command,) = re.findall(r"^bin/fetch-model smollm2-135m (\S+)$", README, re.MULTILINE)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / command).parent.mkdir(parents=True)
    (tmp_path / command).symlink_to(model_dir)
    (tmp_path / "try.py").write_text(example)
    ended = subprocess.run(
        [sys.executable, "try.py"], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    heads = re.findall(r"^ *(-\d+\.\d\d) .*\b(stop|length)\b", ended.stdout, re.MULTILINE)
    assert len(heads) == 8 and len({logprob for logprob, _ in heads}) > 1, ended.stdout


def test_every_command_exists() -> None:
    """Each bin/... that README or CONTRIBUTING shows is there and can be executed."""
    pages = README.split("<!-- file map -->")[0] + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for command in set(re.findall(r"^(bin/[\w-]+|\.ci/run)", pages, re.MULTILINE)):
        assert (ROOT / command).stat().st_mode & 0o111, command
