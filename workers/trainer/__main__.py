"""Entry point of the trainer's process: the loop and its parts, from configuration to exit code. Started by
bin/train."""

from __future__ import annotations

import secrets
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..child import BEAT_S, run_child
from ..process import EXIT_INTERRUPTED, EXIT_OK, Parent
from .config import TrainConfig


def train(parent: Parent) -> int:
    """Run the trainer; returns the exit code."""
    is_over = threading.Event()
    beats = threading.Thread(target=_beat, args=(parent, is_over), name="beats", daemon=True)
    beats.start()
    try:
        return _train(parent)
    finally:
        is_over.set()


def _train(parent: Parent) -> int:
    # torch and transformers are imported late, so that a refused start is quick.
    from .assembly import assemble_loop

    config = TrainConfig.from_dict(parent.config["train"])
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))

    def report(kind: str, values: Mapping[str, Any]) -> None:
        parent.report(kind, **values)

    links = [
        {kind: [parent.fds[f"{kind}.{number}.{part}"] for part in ("memory", "data", "space")]
         for kind in ("orders", "results")}
        for number in range(config.rollout.num_workers)
    ]  # fmt: skip
    with assemble_loop(
        config, Path(parent.config["base_model"]), links, secrets.token_hex(8), report, lambda: bool(signals)
    ) as loop:
        parent.report("ready", step=loop.step, steps=config.steps)
        is_done = loop.run(lambda: bool(signals))
    return EXIT_OK if is_done else EXIT_INTERRUPTED


def _beat(parent: Parent, is_over: threading.Event) -> None:
    """A thread says that the process lives: a step may take long, and rollouts longer (`rollout.stall_s`)."""
    while not is_over.wait(BEAT_S):
        parent.report("beat")


if __name__ == "__main__":
    sys.exit(run_child(train))
