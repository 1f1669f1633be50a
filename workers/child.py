"""What the `main` of every child is: join the parent, log, run, and turn how it ended into an exit code.

Owns: that order, the beat. Knows nothing of what the processes do. Called by the `__main__` modules.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from ..ipc.errors import ERROR_CODES, CapacityError, InvariantError, UnisonError
from .logs import setup_logging
from .process import EXIT_CONFIG, EXIT_FAULT, Parent

log = logging.getLogger(__name__)

BEAT_S = 0.5
"""How often the supervisor is told that a child's loop turns."""
_LONGEST_REASON = 4000


def run_child(body: Callable[[Parent], int]) -> int:
    """Run one child to its end; returns the exit code. Ctrl-C is the supervisor's to hear, who tells with SIGTERM."""
    parent = Parent.join()
    name = parent.config["name"]
    setup_logging(name, parent.config["log_level"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return body(parent)
    except InvariantError:
        log.exception("a promise of ours is broken")
        return EXIT_FAULT
    except UnisonError as error:
        if ERROR_CODES[type(error)].is_retryable and not isinstance(error, CapacityError):
            log.exception("%s ends, to be started again", name)  # the worker was gone, or something took too long
            return EXIT_FAULT
        log.error("can't go on", extra={"reason": str(error), "kind": type(error).__name__})
        parent.report("failed", message=f"{type(error).__name__}: {error}"[:_LONGEST_REASON])
        return EXIT_CONFIG
    except Exception:  # the outermost loop: whatever broke is written down, and the process ends
        log.exception("%s failed", name)
        return EXIT_FAULT


async def beat(parent: Parent) -> None:
    """Say until cancelled that the event loop turns."""
    while True:
        parent.report("beat")
        await asyncio.sleep(BEAT_S)
