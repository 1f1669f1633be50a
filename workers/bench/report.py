"""Measurements as Markdown: what the bench prints, and the tables in docs/performance.md.

Owns: the form of the tables. A page holds marked blocks, `<!-- bench:NAME -->` to `<!-- /bench -->`; each is the table
of docs/measurements/NAME.json, and everything else on the page is written by hand. A block without such a file stays.

    python -m unison.workers.bench.report [--check]     # in a checkout: write the page, or say that it is out of date
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
REPOSITORY = Path(__file__).parents[2]
LIMITS = {
    "read_bytes_per_s, 1 thread": ("memory read, 1 thread", 1e9, "GB/s"),
    "read_bytes_per_s": ("memory read, all threads", 1e9, "GB/s"),
    "copy_bytes_per_s": ("memory copied, read and written bytes", 1e9, "GB/s"),
    "bfloat16_flop_per_s": ("matrix product, bfloat16", 1e12, "TFLOP/s"),
    "float32_flop_per_s": ("matrix product, float32", 1e12, "TFLOP/s"),
}
LONE = "decode B=1"
"""The workload that memory alone bounds."""


def render(measured: dict[str, Any]) -> str:
    """The tables of one JSON file, with a line that says what it was measured on."""
    body = _engine(measured) if measured["kind"] == "engine" else _rows(measured["rows"])
    return f"{_headline(measured)}\n\n{body}\n"


def page_with(page: str, measurements: Path) -> str:
    """The page with every marked block filled from its file in `measurements`, where there is one."""

    def fill(block: re.Match[str]) -> str:
        path = measurements / f"{block[2]}.json"
        if not path.exists():
            return block[0]
        measured = json.loads(path.read_text(encoding="utf-8"))
        return f"{block[1]}{render(measured)}{block[3]}"

    return BLOCK.sub(fill, page)


def main(arguments: Sequence[str]) -> int:
    """Write the page; with --check only say whether it is up to date (exit code 1 where it isn't)."""
    path = REPOSITORY / "docs" / "performance.md"
    before = path.read_text(encoding="utf-8")
    after = page_with(before, REPOSITORY / "docs" / "measurements")
    if before == after:
        return 0
    if "--check" in arguments:
        print("docs/performance.md differs from docs/measurements: run `bin/bench report`", file=sys.stderr)
        return 1
    path.write_text(after, encoding="utf-8")
    return 0


def _headline(measured: dict[str, Any]) -> str:
    machine, versions = measured["machine"], measured["versions"]
    features = ", ".join(machine["features"]) or "no vector features that matter"
    packages = ", ".join(f"{name} {text}" for name, text in versions.items() if name in ("python", "torch"))
    facts = [
        f"Measured on {measured['date']}: {machine['processor']}, {machine['cores']} cores ({features}), "
        f"{machine['memory_bytes'] / 1e9:.0f} GB, {machine['system']}; {packages}; {measured['model']} in "
        f"{measured['dtype']}"
    ]
    if "repeats" in measured:
        runs = measured["repeats"]
        facts.append(f"{measured['threads']} threads, " + (f"medians of {runs} runs" if runs > 1 else "a single run"))
    return ", ".join(facts) + "."


def _engine(measured: dict[str, Any]) -> str:
    names = [name for name in measured["contenders"] if any(name in runs for runs in measured["workloads"].values())]
    rates = {
        work: {name: statistics.median(run["tokens_per_s"] for run in runs) for name, runs in by_name.items()}
        for work, by_name in measured["workloads"].items()
    }
    first, others = names[0], names[1:]
    parts = [
        _table(
            ["tokens/s", *names],
            [[work, *(_number(row.get(name)) for name in names)] for work, row in rates.items()],
        )
    ]
    if others:
        ratios = [
            [work, *(f"{row[first] / row[name]:.2f}" if name in row else "–" for name in others)]
            for work, row in rates.items()
        ]
        parts.append(_table([f"{first} / other", *others], ratios))
    parts.append(_contenders(measured, names))
    if measured["left_out"]:
        parts.append("\n".join(f"Left out: {name}: {reason}" for name, reason in measured["left_out"].items()))
    if measured["limits"]:
        parts.append(_limits(measured, rates.get(LONE, {})))
    return "\n\n".join(parts)


def _contenders(measured: dict[str, Any], names: list[str]) -> str:
    rows = []
    for name in names:
        about = measured["contenders"][name]
        runs = [run for by_name in measured["workloads"].values() for run in by_name.get(name, [])]
        peak = max(run["peak_rss_bytes"] for run in runs)
        versions = ", ".join(f"{package} {text}" for package, text in about["versions"].items() if package != "python")
        rows.append([
            name, f"{about['start_s']:.1f} s", f"{peak / 1e9:.2f} GB" if peak else "–", about["logprobs"],
            f"{about['notes']} ({versions})",
        ])  # fmt: skip
    return _table(["", "ready after", "peak memory", "log-probs", "how it is called"], rows)


def _limits(measured: dict[str, Any], rates: dict[str, float]) -> str:
    limits = measured["limits"]
    rows = [[text, f"{limits[key] / unit:.3g} {word}"] for key, (text, unit, word) in LIMITS.items() if key in limits]
    step, most = measured["step_bytes"].get(LONE), limits.get("read_bytes_per_s")
    for name, rate in rates.items() if step and most else ():
        rows.append([f"share of the read bandwidth that {name} reaches, {LONE}", f"{step * rate / most:.0%}"])
    return _table(["limit of the machine, in the same run", "figure"], rows)


def _rows(rows: dict[str, dict[str, float]]) -> str:
    """Figures that differ from row to row."""
    return _table(
        ["what", "figures"],
        [[name, ", ".join(f"{key} {value:.4g}" for key, value in values.items())] for name, values in rows.items()],
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
