"""Entry point of the trainer's process: the loop and its parts, from configuration to exit code. Started by
bin/train."""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...ipc.errors import InvariantError, UnisonError
from ..logs import setup_logging
from ..process import EXIT_CONFIG, EXIT_FAULT, EXIT_INTERRUPTED, EXIT_OK, Parent
from .config import TrainConfig

log = logging.getLogger(__name__)

BEAT_S = 0.5


def main() -> int:
    """Run the trainer; returns the exit code."""
    parent = Parent.join()
    setup_logging("trainer", parent.config["log_level"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    is_over = threading.Event()
    beats = threading.Thread(target=_beat, args=(parent, is_over), name="beats", daemon=True)
    beats.start()
    try:
        return _train(parent)
    except InvariantError:
        log.exception("a promise of ours is broken")
        return EXIT_FAULT
    except UnisonError as error:
        log.error("can't train", extra={"reason": str(error), "kind": type(error).__name__})
        parent.report("failed", message=f"{type(error).__name__}: {error}"[:4000])
        return EXIT_CONFIG
    except Exception:  # the outermost loop: whatever broke is written down, and the process ends
        log.exception("the trainer failed")
        return EXIT_FAULT
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
        parent.report("ready", step=loop.step)
        is_done = loop.run(lambda: bool(signals))
    return EXIT_OK if is_done else EXIT_INTERRUPTED


def _beat(parent: Parent, is_over: threading.Event) -> None:
    """A thread says that the process lives: a step may take long, and rollouts longer (`rollout.stall_s`)."""
    while not is_over.wait(BEAT_S):
        parent.report("beat")


if __name__ == "__main__":
    sys.exit(main())
