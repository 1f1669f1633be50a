"""The self-test behind `bin/serve doctor`: one child, started as every child is, tries what a run stands on.

A frame goes through a ring and back, a message through the channel and back, an arena is filled here and hashed there,
and the engine's incremental forward is compared with the trainer's packed one, bit for bit. What the child hasn't
answered by the deadline counts as not answered, whatever keeps it.

Owns: both sides of these experiments. Knows nothing of how they are shown. Called by the doctor.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import zmq

from ..ipc.address import Address, new_token, socket_path
from ..ipc.channel import Dialer, Listener
from ..ipc.messages import CODEC, Ping, Pong
from ..ipc.ring import Ring, RingReader, RingWriter
from .child import run_child
from .process import EXIT_OK, Child, Parent

RING_BYTES, FRAME = 1 << 16, bytes(range(256)) * 8
TINY_CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}  # fmt: skip
"""A model made in memory, where no directory is given."""
PARTS = ("ring", "channel", "arena", "bfloat16", "float32", "model")
"""In the order in which they are tried."""


@dataclass(frozen=True)
class Outcome:
    """What came of one experiment."""

    part: str
    """One of PARTS."""
    is_good: bool | None
    """None: no answer came in time."""
    text: str
    """What was seen."""


def run_trials(model: Path | None, deadline_s: float) -> list[Outcome]:
    """All experiments, those on `model` where it is given; over after `deadline_s` at the latest."""
    wanted = [part for part in PARTS if part != "model" or model is not None]
    found: dict[str, Outcome] = {}
    with _Bench(model) as bench:
        until_s = monotonic() + deadline_s
        while len(found) < len(wanted) and monotonic() < until_s:
            found |= {outcome.part: outcome for outcome in bench.turn()}
            if not bench.child.is_running():
                found |= {outcome.part: outcome for outcome in bench.turn()}
                break
        story = f"no answer within {deadline_s:.0f} s"
        if not bench.child.is_running() and len(found) < len(wanted):
            story = bench.child.story()
        is_good = None if bench.child.is_running() else False
    return [found.get(part, Outcome(part, is_good, story)) for part in wanted]


class _Bench:
    """The parent's side: a folder, two rings, a listener, an arena, and the child. Gone at the end of the block."""

    def __init__(self, model: Path | None) -> None:
        self._model = model
        self._stack = ExitStack()

    def __enter__(self) -> _Bench:
        with self._stack as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="unison-doctor-")))
            self._digest, arena_fd = undo.enter_context(_filled_arena())
            rings = {name: Ring.create(RING_BYTES) for name in ("out", "back")}
            for ring in rings.values():
                undo.callback(ring.close)
            self._out, self._back = RingWriter(rings["out"]), RingReader(rings["back"])
            self._listener = Listener(f"ipc://{socket_path(folder, 'trial.sock')}")
            undo.callback(self._listener.close)
            fds = {f"{name}.{at}": fd for name, ring in rings.items() for at, fd in enumerate(ring.fds)}
            config = {
                "name": "trial", "log_level": "error", "endpoint": self._listener.endpoint,
                "model": str(self._model) if self._model else "",
            }  # fmt: skip
            self.child = Child.spawn("trial", "unison.workers.trial", config, fds | {"arena": arena_fd},
                                     folder / "trial.log")  # fmt: skip
            undo.callback(self.child.close)
            self._out.push(FRAME, 1.0)
            self._stack = undo.pop_all()
        self._poller = zmq.Poller()
        for source in (self.child.control.fileno(), self._back.fileno(), self._listener.socket):
            self._poller.register(source, zmq.POLLIN)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def turn(self) -> Iterator[Outcome]:
        """Answer what has come, waiting a moment for it; yields what is known then."""
        self._poller.poll(100)
        for received in self._listener.drain(8):
            call_id, message = CODEC.decode(received.frame)
            if isinstance(message, Ping):
                self._listener.send(received.peer, call_id, Pong())
        self._back.clear()
        for frame in self._back.pop_many(8):
            text = f"{len(frame)} bytes to another process and back"
            yield Outcome("ring", frame == FRAME, text if frame == FRAME else "another frame came back than was sent")
        for report in self.child.reports():
            if report.kind == "arena":
                is_same = report.values["digest"] == self._digest
                seen = "the same bytes" if is_same else f"other bytes ({report.values['digest']})"
                yield Outcome("arena", is_same, f"written here, {seen} read in another process")
            elif report.kind in PARTS:
                yield Outcome(report.kind, report.values["is_good"], report.values["text"])


@contextmanager
def _filled_arena() -> Iterator[tuple[str, int]]:
    """An arena whose first buffer holds the small model's weights: their digest, and the descriptor."""
    import torch

    from ..ipc.arena.arena import WeightArena
    from .gpu.weights import arena_layout

    layout, weights = _tiny(torch.bfloat16)
    arena = WeightArena.create(arena_layout(layout, "trial"))
    try:
        tensors = arena.write(0)
        for name in layout.entries:
            tensors[name].copy_(weights[name])
        version, _ = arena.seal(0, 0)
        yield version.digest, arena.fd
    finally:
        arena.close()


def _tiny(dtype: Any) -> tuple[Any, dict[str, Any]]:
    """Layout and random weights of the small model."""
    import torch

    from ..engine.models.layout import WeightLayout
    from ..engine.models.spec import ModelSpec

    layout = WeightLayout(ModelSpec.from_config(TINY_CONFIG), dtype)
    views = layout.views(layout.allocate())
    generator = torch.Generator().manual_seed(0)
    for name in layout.entries:
        noise = torch.randn(views[name].shape, generator=generator) * 0.15
        views[name].copy_(1 + noise if "norm" in name else noise)
    return layout, views


# ---- the child -------------------------------------------------------------------------------------------------------


def try_all(parent: Parent) -> int:
    """The child's side; what can be tried without torch comes first."""
    out, back = (Ring.attach([parent.fds[f"{name}.{at}"] for at in range(3)]) for name in ("out", "back"))
    with out, back:
        reader, writer = RingReader(out), RingWriter(back)
        reader.wait(5.0)
        for frame in reader.pop_many(1):
            writer.push(frame, 1.0)
    _try_channel(parent)
    from ..ipc.arena.arena import WeightArena

    arena = WeightArena.attach(parent.fds["arena"])
    parent.report("arena", digest=arena.manifest(0).digest)
    arena.close()
    for dtype in ("bfloat16", "float32"):
        _try_exactness(parent, dtype, None)
    if parent.config["model"]:
        _try_exactness(parent, "bfloat16", Path(parent.config["model"]))
    return EXIT_OK


def _try_channel(parent: Parent) -> None:
    dialer = Dialer(Address(parent.config["endpoint"], "trial", 0, new_token()))
    try:
        started_s = monotonic()
        dialer.send(1, Ping())
        poller = zmq.Poller()
        poller.register(dialer.fileno(), zmq.POLLIN)
        answers: list[tuple[int, Any]] = []
        while not answers and monotonic() - started_s < 5.0:
            poller.poll(20)
            answers = dialer.drain()
        is_good = answers == [(1, Pong())]
        text = f"answered after {1000 * (monotonic() - started_s):.1f} ms" if is_good else f"came back: {answers}"
        parent.report("channel", is_good=is_good, text=text)
    finally:
        dialer.close()


def _try_exactness(parent: Parent, dtype_name: str, directory: Path | None) -> None:
    """Engine against packed forward, on the directory's weights or on the small model's."""
    import torch

    from ..engine.assembly import forward_parts
    from ..engine.config import EngineConfig
    from ..engine.models.layout import WeightLayout
    from ..engine.models.loader import load
    from ..engine.models.spec import ModelSpec
    from ..engine.runtime.exactness import check_exactness

    dtype = getattr(torch, dtype_name)
    if directory is None:
        layout, views = _tiny(dtype)
    else:
        layout = WeightLayout(ModelSpec.from_dir(directory), dtype)
        views = load(directory, layout, torch.device("cpu"))
    parts = forward_parts(layout.spec, EngineConfig(dtype=dtype_name))
    found = check_exactness(parts.decoder, layout.bind(views), parts.attention)
    parent.report("model" if directory else dtype_name, is_good=found.is_exact, text=found.reason)


if __name__ == "__main__":
    sys.exit(run_child(try_all))
