"""Janitor: cleans up after a supervisor that was killed: ends its children and removes the run's sockets.

A process of its own, since nobody else is left to do it. It holds a pidfd of each child, so that a recycled process id
is never hit, and waits on a pipe that only the supervisor has open for writing. Told `done`, it ends without doing
anything; at the end of the pipe without that word, it acts.

Owns: nothing while the supervisor lives. Imports the standard library only, so that it is small. Started by the
supervisor as `python -m unison.workers.janitor RUN_DIR`, with the pipe as standard input.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

VOLATILE = ("*.sock", "address.json", ".address.json.*", "supervisor.json", ".supervisor.json.*")
"""What a run directory holds only while something runs there."""


def main() -> int:
    """Follow the supervisor's lines until its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run_dir = Path(sys.argv[1])
    pidfds: dict[int, int] = {}
    for line in sys.stdin:
        word = line.strip()
        if word == "done":
            return 0
        if word.startswith("+"):
            try:
                pidfds[int(word[1:])] = os.pidfd_open(int(word[1:]))
            except ProcessLookupError:  # it has ended already
                continue
        elif (pidfd := pidfds.pop(int(word[1:]), None)) is not None:
            os.close(pidfd)
    for pidfd in pidfds.values():
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:  # the kernel was faster
            continue
    remove_volatile(run_dir)
    return 0


def remove_volatile(run_dir: Path) -> None:
    """Remove what a dead run has left in its directory, so that it can be used again."""
    for pattern in VOLATILE:
        for path in run_dir.glob(pattern):
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
