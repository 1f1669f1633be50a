"""A run of bin/serve for the bench: started as a user would, waited for, stopped.

Owns: the process. Called by the benches of what lies around the engine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...ipc.errors import ProcessFailedError


@dataclass(frozen=True)
class ServedRun:
    """A run that is ready."""

    run_dir: Path
    """Its directory."""
    url: str
    """Where it serves HTTP; empty without."""


@contextmanager
def served(model: Path, dtype: str, *options: str) -> Iterator[ServedRun]:
    """Serve `model` with HTTP on a free port, until the end of the block.

    Raises:
        ProcessFailedError: it didn't get ready.
    """
    with tempfile.TemporaryDirectory(prefix="unison-bench-") as directory:
        run_dir = Path(directory) / "run"
        command = [
            sys.executable, "-m", "unison.workers.cli", "--model", str(model), "--dtype", dtype, "--port", "0",
            "--run-dir", str(run_dir), *options,
        ]  # fmt: skip
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ
        ) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                if not line.startswith("ready:"):
                    raise ProcessFailedError(f"bin/serve didn't get ready: {line!r}; try it by hand: {command}")
                word = line.split()[1]
                yield ServedRun(run_dir, word if word.startswith("http") else "")
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
