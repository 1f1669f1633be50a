"""The weights at a worker's start: a fresh arena filled from the model's directory, or the arena of a worker that died.

Owns: the order of things that makes a start safe: fill, seal, hold, live; or hold, attest, live. A restarted worker
takes no traffic before the live buffer's bytes have the digest that the header names (P10). Device memory dies with
its worker: there only the directory's own weights can be served again, and a published version is never replaced by
them. Called by the worker's entry point.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from ...engine.models.layout import WeightLayout
from ...engine.models.loader import load_into
from ...ipc.arena.arena import WeightArena
from ...ipc.arena.header import ArenaHeader
from ...ipc.arena.layout import ArenaLayout, ArenaTensor
from ...ipc.errors import ArenaError, DigestMismatchError
from ...ipc.memory import SharedMemory
from ...ipc.types import PolicyVersion


def arena_layout(layout: WeightLayout, model: str) -> ArenaLayout:
    """The engine's layout in the arena's own words, aliases included."""
    item = layout.dtype.itemsize
    own = [ArenaTensor(name, entry.shape, entry.offset * item) for name, entry in layout.entries.items()]
    aliases = [
        ArenaTensor(alias, layout.entries[name].shape, layout.entries[name].offset * item, name)
        for alias, name in layout.aliases.items()
    ]
    return ArenaLayout(model, str(layout.dtype).removeprefix("torch."), layout.num_bytes, (*own, *aliases))


def fill_arena(
    directory: Path, layout: WeightLayout, model: str, num_buffers: int, device: str = "cpu", ordinal: int = 0
) -> WeightArena:
    """A new arena with the directory's weights live in buffer 0 as version `ordinal`."""
    arena = WeightArena.create(arena_layout(layout, model), num_buffers, device)
    try:
        if torch.device(device).type == "cpu":
            # Written through a view of its own, which is unmapped again: the engine's own mapping can't be written.
            writer = WeightArena.attach(os.dup(arena.fd))
            try:
                load_into(directory, layout, writer.write(0))
                writer.seal(0, ordinal)
            finally:
                writer.close()
        else:
            load_into(directory, layout, arena.write(0))
            arena.seal(0, ordinal)
        arena.hold(0)
        arena.set_live(0)
    except BaseException:
        arena.close()
        raise
    return arena


def refill_arena(
    fd: int, directory: Path, layout: WeightLayout, num_buffers: int, device: str
) -> tuple[WeightArena, PolicyVersion]:
    """A new device arena after a worker's death: the directory's weights, if those were live (`fd` is the old header).

    Raises:
        ArenaError: another version was live; its weights died with the worker, and the directory's aren't them.
    """
    old = SharedMemory.attach(fd)
    with old, old.map(writable=False, length=mmap.PAGESIZE) as start:
        length = ArenaHeader.peek_bytes(bytes(start))
        with old.map(writable=True, length=length) as pages:
            header = ArenaHeader(pages)
            try:
                model, highest, live = header.layout.model, header.highest_ordinal, header.live_buffer
                version = None if live is None else header.record(live).version
            finally:
                header.close()
    arena = fill_arena(directory, layout, model, num_buffers, device)
    try:
        found = arena.record(0).version
        if version is None or found is None or found.digest != version.digest:
            raise ArenaError(
                f"version {None if version is None else version.ordinal} was live, and its weights died with the "
                "worker on the device; they aren't replaced by the directory's; start anew from a checkpoint and "
                "publish again"
            )
        arena.header.seal(0, version)
        arena.set_live(0)
        arena.header.raise_ordinal(highest)
    except BaseException:
        arena.close()
        raise
    return arena, version


def adopt_arena(fd: int, layout: WeightLayout, model: str) -> tuple[WeightArena, PolicyVersion]:
    """The arena of a worker that died, with its live version attested anew.

    Raises:
        ArenaError: it is for another model, or no version was live. DigestMismatchError: the bytes aren't those that
        were live.
    """
    arena = WeightArena.attach(fd)
    try:
        if arena.layout != arena_layout(layout, model):
            raise ArenaError(f"the arena holds weights of {arena.layout.model}, not of {model} in this layout")
        buffer = arena.header.live_buffer
        version = arena.record(buffer).version if buffer is not None else None
        if buffer is None or version is None:
            raise ArenaError("no version was live in the arena")
        arena.hold(buffer)
        found = arena.manifest(buffer).digest
        if found != version.digest:
            raise DigestMismatchError(
                f"version {version.ordinal} was live with digest {version.digest}, its bytes have {found} now; "
                "it isn't served; start anew and publish again"
            )
        for other in range(arena.num_buffers):
            if other != buffer and not arena.locks.is_held_by_others(other):
                arena.drop(other)
    except BaseException:
        arena.close()
        raise
    return arena, version


def engine_views(arena: WeightArena, layout: WeightLayout, buffer: int) -> dict[str, Tensor]:
    """A buffer's tensors as the engine reads them: read-only views, mapped once per buffer."""
    with torch.inference_mode(False):
        return layout.views(arena.flat(buffer))
