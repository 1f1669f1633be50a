"""WeightPublisher: the trainer's side of an update: reserve a buffer, write it in place, seal, publish, go on.

The tensors that `update` hands out are the arena's own pages, so whoever computes new weights writes them straight to
where the engine will read them; nothing is sent but a manifest. A publication that fails changes nothing (V5), and a
publisher that dies leaves a buffer that counts as free.

Owns: the order of the three steps. Knows nothing of models. Called by trainers; needs torch.

Example:
    publisher = WeightPublisher(client)
    with publisher.update() as update:
        for name, tensor in update.tensors.items():
            tensor.copy_(new_weights[name])
    print(update.live.version)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..address import FD_SOCKET
from ..client import Client
from ..errors import ArenaError, UnisonError
from ..memory import fetch_fds
from ..messages import WeightsLive
from ..types import PolicyVersion
from .arena import WeightArena


@dataclass
class Update:
    """One update in progress."""

    tensors: dict[str, Tensor]
    """Writable, by Hugging Face name, aliases included; what they hold at first is an older version or nothing."""
    buffer: int
    """Where they lie."""
    ordinal: int
    """What the version will be called."""
    live: WeightsLive | None = None
    """Set once the version is live."""


class WeightPublisher:
    """Publishes versions of one run. Life: attached to the run's arena → any number of updates → closed. One thread."""

    def __init__(self, client: Client, deadline_s: float = 30.0) -> None:
        """Get the arena of the run that `client` is connected to.

        Raises:
            HandshakeError: the run offers none to this process.
        """
        self._client = client
        self._deadline_s = deadline_s
        self._epoch = client.worker.epoch
        self._held: int | None = None
        self.sealed: PolicyVersion | None = None
        """The last version that was handed to the worker; whether it went live is known from the answer, or, where that
        was lost, from `read_live`."""
        self.arena = attach_arena(client.run_dir, deadline_s)

    @contextmanager
    def update(self, wait_s: float = 30.0) -> Iterator[Update]:
        """Reserve a buffer, hand out its tensors, and at the end of the block publish them; the version is live then.

        Leaving the block by an exception publishes nothing. The tensors must not be written after it.

        Raises:
            VersionBusyError: every buffer is in use for longer than `wait_s`. DigestMismatchError: the bytes changed
            under way. WorkerLostError: the worker is gone; update again when it is back.
        """
        self._follow_worker()
        reserved = self._client.reserve_buffer(wait_s)
        buffer = reserved.buffer
        try:
            update = Update(self.arena.write(buffer), buffer, reserved.next_ordinal)
            yield update
            version, manifest = self.arena.seal(buffer, update.ordinal)
            self.sealed = version
            update.live = self._client.publish(version, buffer, manifest)
        except BaseException:
            self.arena.let_go(buffer)
            self._abandon(buffer)
            raise
        self.arena.let_go(buffer)

    def publish(self, tensors: Mapping[str, Tensor], wait_s: float = 30.0) -> WeightsLive:
        """Copy a whole weight set into a buffer and make it live; aliases may be left out.

        Raises:
            ArenaError: a tensor is missing, unexpected or of another shape; nothing is published. And as `update`.
        """
        layout = self.arena.layout
        shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
        needed = {tensor.name for tensor in layout.tensors if tensor.alias_of is None}
        wrong = sorted({*(needed - tensors.keys()), *(tensors.keys() - shapes.keys())})
        wrong += [name for name, given in tensors.items() if name in shapes and tuple(given.shape) != shapes[name]]
        if wrong:
            raise ArenaError(f"missing, unexpected or of another shape: {', '.join(wrong[:8])}")
        with self.update(wait_s) as update, torch.no_grad():
            for name in needed:
                update.tensors[name].copy_(tensors[name])
        assert update.live is not None
        return update.live

    def read_live(self) -> tuple[PolicyVersion, dict[str, Tensor]]:
        """The live version and its tensors, read-only, where the engine reads them (aliases included).

        They are held: nobody writes them before the next `read_live`, or before this process ends (V2).
        """
        while True:
            buffer = self.arena.header.live_buffer
            if buffer is None:
                raise ArenaError("no version is live in the arena")
            self.arena.hold(buffer)
            if self.arena.header.live_buffer == buffer:
                break
            if buffer != self._held:
                self.arena.let_go(buffer)
        if self._held not in (None, buffer):
            self.arena.let_go(self._held)
        self._held = buffer
        version = self.arena.record(buffer).version
        assert version is not None
        return version, self.arena.tensors(self.arena.flat(buffer))

    def close(self) -> None:
        """Unmap the arena."""
        self.arena.close()

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow_worker(self) -> None:
        """A new worker on a GPU has device memory of its own; on CPU the arena is the same."""
        epoch = self._client.worker.epoch
        if epoch != self._epoch and self.arena.buffers.describe():
            self.arena.close()
            self._held = None
            self.arena = attach_arena(self._client.run_dir, self._deadline_s)
        self._epoch = epoch

    def _abandon(self, buffer: int) -> None:
        try:
            self._client.abandon_buffer(buffer)
        except UnisonError:  # published and refused, or the worker is gone: there is no reservation to give back
            pass


def attach_arena(run_dir: Path, deadline_s: float) -> WeightArena:
    """The arena of a run, through its descriptor socket."""
    description, (fd,) = fetch_fds(run_dir / FD_SOCKET, "arena", deadline_s)
    return WeightArena.attach(fd, description)
