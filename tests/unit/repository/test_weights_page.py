"""docs/weights.md against the code: states, places in the header, messages, and its example, run for real."""

from __future__ import annotations

import re
from pathlib import Path

from harness.serving import WorkerThread
from harness.source_tree import ROOT
from harness.tiny_directory import write_tiny_directory
from harness.tiny_model import tiny_spec, tiny_weights
from unison.ipc.arena import header
from unison.ipc.arena.layout import BufferState
from unison.ipc.messages import MESSAGES
from unison.ipc.types import OnUpdate

PAGE = (ROOT / "docs/weights.md").read_text(encoding="utf-8")


def test_states_are_the_codes_own() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert rows == [state.name.lower() for state in BufferState]


def test_places_in_the_header() -> None:
    assert f"bytes 0 to {header.PAGE_BYTES - 1}" in PAGE and f"from {header.PAGE_BYTES} " in PAGE
    assert f"at multiples of {header.BUFFER_ALIGNMENT_BYTES}" in PAGE
    assert f"at {header._LIVE_WORD * 8} the version word" in PAGE
    assert f"at {header._HIGHEST_WORD * 8} the highest ordinal" in PAGE
    assert f"from {header._FIRST_RECORD}, {header._RECORD_BYTES} bytes per buffer" in PAGE


def test_messages_and_rules_exist() -> None:
    known = {kind.__name__ for kind in MESSAGES}
    named = set(re.findall(r"`([A-Z]\w+)`", PAGE))
    assert named and named <= known
    assert all(f"`{rule.value}`" in PAGE for rule in OnUpdate)


def test_the_example_runs(tmp_path: Path) -> None:
    """V1: the page's own code publishes a version."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    write_tiny_directory(tmp_path / "model")
    with WorkerThread(tmp_path / "r", tmp_path / "model", {}) as worker:
        names = {"run_dir": worker.run_dir, "new_weights": tiny_weights(tiny_spec(), seed=1)}
        exec(compile(code, "docs/weights.md", "exec"), names)
        assert worker.engine.live_version.ordinal == 1
        names.clear()
