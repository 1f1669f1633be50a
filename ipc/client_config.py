"""ClientConfig: the times of a client, and which run it means.

Owns: defaults and their meaning, the check of a run directory. Read by the clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError


@dataclass(frozen=True)
class ClientConfig:
    """Times of a client, in seconds."""

    connect_s: float = 30.0
    """How long `connect` waits for a worker that answers."""
    call_s: float = 60.0
    """Deadline of a control call where none is given."""
    tick_s: float = 0.25
    """How often deadlines, the worker's process and the address file are looked at."""
    ping_s: float = 1.0
    """How often the worker is asked for a sign of life."""
    silence_s: float = 60.0
    """A worker that says nothing for so long counts as lost; longer than its longest step."""
    return_s: float = 60.0
    """How long resubmitted calls wait for a new worker before they fail."""


def named_directory(run_dir: str | Path) -> Path:
    """A run's directory as a path.

    Raises:
        ConfigError: it is empty, which as a path would mean the working directory.
    """
    if run_dir == "":
        raise ConfigError("run_dir", "is empty; give the directory that bin/serve printed, or the training run's")
    return Path(run_dir)
