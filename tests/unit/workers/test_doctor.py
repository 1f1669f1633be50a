"""bin/serve doctor: what it looks at, what it says, and that a trouble is never an ok."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unison.workers.doctor import Check, State, cpu_quota, render
from unison.workers.trial import PARTS, run_trials


def doctor(*arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the checks by name."""
    ended = subprocess.run(
        [sys.executable, "-m", "unison.workers.cli", "doctor", "--json", *arguments], stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | environment,
    )  # fmt: skip
    assert ended.stdout, ended.stderr
    values = json.loads(ended.stdout)
    assert values["machine"]["machine"]["cores"] > 0
    return ended.returncode, {check["name"]: check for check in values["checks"]}


@pytest.mark.slow
def test_a_machine_that_can_test_itself(chat_model: Path) -> None:
    """Processes are tried for real, and so are the given model's weights; exit code 0 where nothing failed."""
    code, checks = doctor("--model", str(chat_model), "--deadline-s", "60")
    names = {"ring", "channel", "arena", "exact in bfloat16", "exact in float32", "exact on the model"}
    assert names | {"kernels", "processor", "cores", "memory", "open files", "GPU", "packages"} <= set(checks)
    assert all(checks[name]["state"] == "ok" for name in ("ring", "channel", "arena", "system", "shared memory"))
    failed = [name for name, check in checks.items() if check["state"] == "failed"]
    assert code == (1 if failed else 0), failed
    assert "equal" in checks["exact on the model"]["found"] or failed
    assert all(check["advice"] for check in checks.values() if check["state"] != "ok")


@pytest.mark.slow
def test_troubles_are_named(tmp_path: Path) -> None:
    """A directory that is no model fails, with exit code 1; kernels that were turned off are a warning."""
    code, checks = doctor(
        "--model", str(tmp_path), "--deadline-s", "60", UNISON_KERNELS="torch", CXX="/no/such/compiler"
    )
    assert code == 1
    assert checks["model"]["state"] == checks["exact on the model"]["state"] == "failed"
    assert "config.json" in checks["model"]["found"] and "config.json" in checks["exact on the model"]["found"]
    assert checks["kernels"]["state"] == "warning" and "UNISON_KERNELS=torch" in checks["kernels"]["found"]
    assert checks["compiler"]["state"] == "warning" and "/no/such/compiler" in checks["compiler"]["found"]
    assert "UNISON_KERNELS=torch" in checks["environment"]["found"] and checks["ring"]["state"] == "ok"


def test_no_answer_is_no_ok() -> None:
    """P2: the self-test ends at its deadline, and what wasn't answered is said to be that."""
    outcomes = run_trials(None, 0.0)
    assert [outcome.part for outcome in outcomes] == [part for part in PARTS if part != "model"]
    assert all(outcome.is_good is None and "no answer within 0 s" in outcome.text for outcome in outcomes)


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1.5),
        ("0::/a/b\n", {"cpu.max": "400000 100000\n", "a/b/cpu.max": "200000 100000\n"}, 2.0),
        ("3:memory:/x\n2:cpu,cpuacct:/x\n",
         {"cpu,cpuacct/x/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n"}, 0.5),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("0::/\n", {}, None),
    ],
)  # fmt: skip
def test_the_closest_quota_counts(groups: str, files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    """Both versions of control groups, at every level above the process."""
    for name, text in ({f"sys/fs/cgroup/{name}": text for name, text in files.items()} | {
        "proc/self/cgroup": groups
    }).items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota


def test_the_table_shows_what_to_do() -> None:
    table = render([Check("a", State.OK, "fine"), Check("b", State.FAILED, "x [y]", "install z")])
    assert table.row_count == 2 and table.title == "1 ok, 0 warning, 1 failed"
