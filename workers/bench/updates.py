"""Updates: what a stream of new versions costs requests in flight, by update rule.

The new versions are copies of the weights with a few tensors changed, written by a trainer thread of this process,
whose work shares the machine with what is measured.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ...engine.models.layout import WeightLayout
from ...engine.models.loader import load
from ...engine.models.spec import ModelSpec
from ...ipc.types import OnUpdate
from .served import served
from .update_load import UpdateLoad, run_update_load

Rows = dict[str, dict[str, float]]


def measure_updates(model: Path, dtype: str, duration_s: float) -> Rows:
    """Gaps between tokens of 32 streams without updates, then with one every 500 ms under each rule."""
    layout = WeightLayout(ModelSpec.from_dir(model), getattr(torch, dtype))
    base = load(model, layout, torch.device("cpu"))

    def write(tensors: dict[str, Tensor], ordinal: int) -> None:
        with torch.no_grad():
            for name in layout.entries:
                tensors[name].copy_(base[name])
            tensors["model.norm.weight"].mul_(1 + 0.02 * (ordinal % 17))

    rows: Rows = {}
    with served(model, dtype, "--no-http") as run:
        for rule, interval_s in [(OnUpdate.FINISH, None), *((rule, 0.5) for rule in OnUpdate)]:
            load_ = UpdateLoad(run.run_dir, rule, duration_s=duration_s, interval_s=interval_s)
            report = run_update_load(load_, write)
            name = "no updates" if interval_s is None else f"every 500 ms, {rule.value}"
            rows[name] = {
                "tokens/s": report.num_tokens / report.seconds,
                "gap p50 ms": report.gap_s(0.50) * 1e3,
                "gap p99 ms": report.gap_s(0.99) * 1e3,
                "requests": len(report.outputs),
                "failures": len(report.failures),
                "published": len(report.published),
                "postponed": report.num_postponed,
                "publish p50 ms": sorted(report.publish_s)[len(report.publish_s) // 2] * 1e3 if report.publish_s else 0,
            }
    quiet = rows["no updates"]["gap p99 ms"]
    for name, row in rows.items():
        if name != "no updates":
            row["gap p99 ratio"] = row["gap p99 ms"] / quiet
    return rows
