"""ClientConfig: the times of a client.

Owns: defaults and their meaning. Read by the clients.
"""

from __future__ import annotations

from dataclasses import dataclass


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
