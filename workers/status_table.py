"""The live table of `bin/serve status RUN`.

Owns: what is shown of a WorkerStatus, and how. Called by the command line.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from ..ipc.client import Client, ClientConfig
from ..ipc.messages import WorkerStatus
from .supervisor import STATE_FILE


def show(run_dir: Path, once: bool, interval_s: float) -> None:
    """Print the run's status once, or again and again until interrupted.

    Raises:
        WorkerLostError, DeadlineError: nothing runs there.
    """
    with Client.connect(run_dir, config=ClientConfig(connect_s=5.0)) as client:
        run = _run(run_dir)
        if once:
            Console().print(render(run, client.status()))
            return
        with Live(render(run, client.status()), auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(render(_run(run_dir), client.status()), refresh=True)


def render(run: dict[str, Any], status: WorkerStatus) -> Group:
    """The table for one reading."""
    facts = Table(title=f"{run.get('model', '?')} · {run.get('url') or 'no HTTP'} · {run.get('state', '?')}")
    facts.add_column("what")
    facts.add_column("value", justify="right")
    used = status.num_blocks - status.num_free_blocks
    rows = {
        "state": "draining" if status.is_draining else "paused" if status.is_paused else "serving",
        "exact": "yes" if status.is_exact else "no",
        "tokens/s (10 s)": f"{status.tokens_per_s:.1f}",
        "running / waiting / queued": f"{status.num_running} / {status.num_waiting} / {status.num_queued}",
        "KV blocks used": f"{used} of {status.num_blocks} ({100 * used / max(1, status.num_blocks):.1f} %)",
        "steps": str(status.step),
        "last step": f"{status.step_age_s:.1f} s ago",
        "longest turn (60 s)": f"{status.loop_age_s * 1000:.0f} ms",
        "time to first token p50 / p99": _pair(status, "ttft"),
        "time per token p50 / p99": _pair(status, "tpot"),
        "clients": str(status.num_clients),
        "uptime": f"{status.uptime_s:.0f} s, epoch {status.epoch}",
    }
    for name, value in rows.items():
        facts.add_row(name, value)
    versions = Table(title="policy versions")
    for column in ("version", "digest", "state", "pins", "buffer"):
        versions.add_column(column)
    for item in status.versions:
        versions.add_row(
            str(item.version.ordinal), item.version.digest, item.state, str(item.num_pins), str(item.buffer)
        )
    return Group(facts, versions)


def _pair(status: WorkerStatus, name: str) -> str:
    p50, p99 = status.latencies_s.get(f"{name}_p50"), status.latencies_s.get(f"{name}_p99")
    return "–" if p50 is None or p99 is None else f"{p50 * 1000:.1f} / {p99 * 1000:.1f} ms"


def _run(run_dir: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads((run_dir / STATE_FILE).read_text())
    except (OSError, ValueError):  # a worker without a supervisor, or a moment between two runs
        return {}
    return values
