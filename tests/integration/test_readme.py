"""The newcomer's path: what README tells a reader to run is run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from harness.serving import serving
from harness.source_tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_the_example_prints_eight_samples(tmp_path: Path, model_dir: Path) -> None:
    """The Python block, in a folder where the model lies at the path that the command before it names."""
    (command,) = re.findall(r"^bin/fetch-model smollm2-135m (\S+)$", README, re.MULTILINE)
    (example,) = [block for block in BLOCKS if "run_batch" in block]
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


@pytest.mark.slow
def test_the_client_example_and_curl_run(tmp_path: Path, model_dir: Path) -> None:
    """The client's Python block and the curl line, against the server that the command before them starts."""
    (curl,) = re.findall(r"^curl -s localhost:8000(\S+) -d '(.*)'$", README, re.MULTILINE)
    (example,) = [block for block in BLOCKS if "Client.connect" in block]
    with serving(tmp_path / "r", model_dir, "--served-name", "smollm2-135m", "--port", "0") as run:
        (tmp_path / "try.py").write_text(example.replace('"DIR"', repr(str(run.run_dir))))
        ended = subprocess.run(
            [sys.executable, "try.py"], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=120, check=False,
        )
        assert ended.returncode == 0 and "VersionStatus" in ended.stdout, ended.stderr
        answer = httpx.post(run.url + curl[0], content=curl[1], timeout=60)
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]


def test_every_command_exists() -> None:
    """Each bin/... that README or CONTRIBUTING shows is there and can be executed."""
    pages = README.split("<!-- file map -->")[0] + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for command in set(re.findall(r"^(bin/[\w-]+|\.ci/run)", pages, re.MULTILINE)):
        assert (ROOT / command).stat().st_mode & 0o111, command
