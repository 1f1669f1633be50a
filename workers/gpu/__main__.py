"""Entry point of the GPU worker's process: weights, engine, channel, then the loop. Started by the supervisor."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import sys
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import zmq

from ...ipc.address import Address, socket_path, write_address
from ...ipc.channel import ChannelConfig, Listener
from ..child import BEAT_S, run_child
from ..config import ServeConfig
from ..process import EXIT_OK, Parent
from .report import WorkerGauges

if TYPE_CHECKING:
    from ...engine.models.layout import WeightLayout
    from ...ipc.arena.arena import WeightArena

log = logging.getLogger(__name__)


def serve(parent: Parent) -> int:
    """Run one worker; returns the exit code."""
    # torch and the engine are imported late, so that a refused start is quick.
    import torch

    from ...engine.engine import Engine
    from ...engine.models.layout import WeightLayout
    from ...engine.models.spec import ModelSpec
    from .weights import engine_views
    from .worker import GpuWorker, WorkerIdentity

    config = ServeConfig.from_dict(parent.config["serve"])
    run_dir, directory = Path(config.run_dir), Path(config.model)
    spec = ModelSpec.from_dir(directory)
    layout = WeightLayout(spec, getattr(torch, config.engine.dtype))
    started_s = monotonic()
    arena, ordinal = _weights(parent, config, layout)
    views = partial(engine_views, arena, layout)
    buffer = arena.header.live_buffer
    assert buffer is not None
    for other in range(arena.num_buffers):
        views(other)  # mapped now, so that a publication allocates nothing
    engine = Engine(spec, views(buffer), config.engine, ordinal, arena.header.highest_ordinal)
    engine.warm_up()
    gc.collect()
    gc.freeze()

    identity = WorkerIdentity(secrets.token_hex(8), os.getpid(), parent.config["token"], config.name)
    curve = zmq.curve_keypair() if config.worker.endpoint else None
    endpoint = config.worker.endpoint or f"ipc://{socket_path(run_dir, f'worker-{identity.epoch}.sock')}"
    listener = Listener(endpoint, ChannelConfig(config.worker.send_queue_messages), curve)
    worker = GpuWorker(engine, arena, views, listener, identity, config.worker)
    signal.signal(signal.SIGTERM, lambda *_: worker.stop(config.supervisor.drain_s))
    public_key = curve[0].decode() if curve else ""
    write_address(run_dir, Address(listener.endpoint, identity.epoch, os.getpid(), identity.token, public_key))
    load_s = monotonic() - started_s
    parent.report("ready", (arena.fd,), epoch=identity.epoch, load_s=load_s, arena=arena.buffers.describe().hex())
    log.info("ready", extra={"epoch": identity.epoch, "load_s": round(load_s, 3)})
    try:
        worker.run(_Beat(parent))
    finally:
        worker.close()
    log.info("stopped")
    return EXIT_OK


def _weights(parent: Parent, config: ServeConfig, layout: WeightLayout) -> tuple[WeightArena, int]:
    """The arena to serve from, and the ordinal of its live version."""
    from .weights import adopt_arena, fill_arena, refill_arena

    directory, num_buffers, device = Path(config.model), config.worker.num_buffers, config.engine.device
    if "arena" not in parent.fds:
        ordinal = config.worker.first_ordinal
        return fill_arena(directory, layout, config.name, num_buffers, device, ordinal), ordinal
    if device.startswith("cpu"):
        arena, version = adopt_arena(parent.fds["arena"], layout, config.name)
    else:
        arena, version = refill_arena(parent.fds["arena"], directory, layout, num_buffers, device)
    return arena, version.ordinal


class _Beat:
    """Tells the parent twice a second that the loop turns."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._last_s = 0.0

    def __call__(self, gauges: WorkerGauges) -> None:
        if gauges.last_turn_s - self._last_s >= BEAT_S:
            self._last_s = gauges.last_turn_s
            self._parent.report("beat", steps=gauges.num_steps)


if __name__ == "__main__":
    sys.exit(run_child(serve))
