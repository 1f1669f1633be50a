"""Measurements as Markdown, and docs/performance.md against docs/measurements."""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness.source_tree import ROOT
from unison.workers.bench import report
from unison.workers.bench.limits import _rate, _read
from unison.workers.machine import describe

ABOUT: dict[str, Any] = {
    "date": "2026-01-02",
    "machine": {
        "processor": "Some CPU", "cores": 2, "features": ["avx2", "avx512f"], "memory_bytes": 24e9, "system": "Linux 6",
    },
    "versions": {"python": "3.11.7", "torch": "2.13.0", "numpy": "2"},
    "model": "tiny", "dtype": "bfloat16", "threads": 2,
}  # fmt: skip


def run(rate: float) -> dict[str, float]:
    return {"seconds": 1.0, "num_tokens": rate, "tokens_per_s": rate, "peak_rss_bytes": 2e9}


ENGINE = ABOUT | {
    "kind": "engine", "repeats": 3, "left_out": {"gone": "gone can't be installed: no such package"},
    "limits": {"read_bytes_per_s": 20e9}, "step_bytes": {"decode B=1": 200_000_000},
    "contenders": {
        name: {"start_s": 1.5, "versions": {"python": "3", name: "1.0"}, "logprobs": "all", "notes": "called"}
        for name in ("ours", "peer")
    },
    "workloads": {
        "decode B=1": {"ours": [run(40), run(50), run(90)], "peer": [run(20), run(25), run(30)]},
        "RL rollout": {"ours": [run(100)]},
    },
}  # fmt: skip


def test_engine_tables() -> None:
    lines = report.render(ENGINE).splitlines()
    assert lines[0].startswith(
        "Measured on 2026-01-02: Some CPU, 2 cores (avx2, avx512f), 24 GB, Linux 6; python 3.11.7"
    )
    assert lines[0].endswith("tiny in bfloat16, 2 threads, medians of 3 runs.")
    assert "| decode B=1 | 50.0 | 25.0 |" in lines and "| decode B=1 | 2.00 |" in lines
    assert "| RL rollout | 100.0 | – |" in lines and "| RL rollout | – |" in lines
    assert "| peer | 1.5 s | 2.00 GB | all | called (peer 1.0) |" in lines
    assert "Left out: gone: gone can't be installed: no such package" in lines
    assert "| share of the read bandwidth that ours reaches, decode B=1 | 50% |" in lines


def test_rows_of_figures() -> None:
    text = report.render(ABOUT | {"kind": "walls", "rows": {"client": {"ratio": 1.01234, "tokens/s": 485.0}}})
    assert "| client | ratio 1.012, tokens/s 485 |" in text.splitlines()


def test_blocks_alone_change(tmp_path: Path) -> None:
    (tmp_path / "walls.json").write_text(json.dumps(ABOUT | {"kind": "walls", "rows": {"a": {"b": 1.0}}}))
    page = "# By hand\n\n<!-- bench:walls -->\nold\n<!-- /bench -->\n\nAlso by hand.\n"
    filled = report.page_with(page, tmp_path)
    assert filled.startswith("# By hand\n\n<!-- bench:walls -->\nMeasured on") and "| a | b 1 |" in filled
    assert filled.endswith("<!-- /bench -->\n\nAlso by hand.\n") and "old" not in filled
    assert report.page_with(filled, tmp_path) == filled
    unmeasured = page.replace("walls", "train")
    assert report.page_with(unmeasured, tmp_path) == unmeasured


def test_the_page_is_what_the_measurements_say() -> None:
    assert report.main(["--check"]) == 0, "run `bin/bench report`"
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    blocks = {name for _, name, _ in report.BLOCK.findall(page)}
    assert blocks >= {path.stem for path in (ROOT / "docs/measurements").glob("*.json")}


def test_measurements_name_no_path_of_a_machine() -> None:
    for path in (ROOT / "docs/measurements").glob("*.json"):
        assert not re.search(r"/(root|home|Users|tmp|work)/", path.read_text(encoding="utf-8")), path


def test_the_machine_is_described() -> None:
    found = describe()
    assert found["machine"]["cores"] >= 1 and found["versions"].keys() >= {"python", "torch", "numpy"}


@pytest.mark.parametrize("threads", [1, 2])
def test_bandwidth_covers_the_buffer_once_per_repeat(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr("unison.workers.bench.limits.BUFFER_BYTES", 1000)
    seen: list[tuple[int, int]] = []
    assert _rate(lambda offset, size: seen.append((offset, size)), threads) > 0
    assert sorted(set(seen)) == [(at * (1000 // threads), 1000 // threads) for at in range(threads)]


def test_reading_finds_no_byte() -> None:
    buffer = ctypes.create_string_buffer(b"\1" * 64, 64)
    assert _read(ctypes.addressof(buffer))(0, 64) is None
