"""The ring against a deque, with both sides dying and being replaced at any time."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from unison.ipc.ring import PAGE_BYTES, Ring, RingReader, RingWriter


class RingMachine(RuleBasedStateMachine):
    """P3: no frame is lost, none is torn, none comes twice but the one that its reader died over."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring.create(4096)
        self.writer, self.reader = RingWriter(self.ring), RingReader(self.ring)
        self.model: deque[bytes] = deque()
        self.held: bytes | None = None

    @rule(frame=st.binary(max_size=1200))
    def push(self, frame: bytes) -> None:
        if self.writer.try_push(frame):
            self.model.append(frame)
        else:
            assert self.model or self.held is not None, "an empty ring takes any frame"

    @rule()
    def pop(self) -> None:
        frame = self.reader.pop()
        assert frame == (self.model.popleft() if self.model else None)
        self.held = frame

    @rule()
    def give_up(self) -> None:
        self.reader.give_up()
        self.held = None

    @rule()
    def producer_dies(self) -> None:
        self.writer = RingWriter(self.ring)

    @rule(garbage=st.binary(min_size=1, max_size=200))
    def producer_dies_in_a_frame(self, garbage: bytes) -> None:
        room = 4096 - (int(self.ring.words[8]) - int(self.ring.words[16]))
        offset = int(self.ring.words[8]) % 4096
        torn = garbage[: min(room, 4096 - offset)]
        self.ring.bytes[PAGE_BYTES + offset : PAGE_BYTES + offset + len(torn)] = torn
        self.writer = RingWriter(self.ring)

    @rule()
    def consumer_dies(self) -> None:
        self.reader = RingReader(self.ring)
        if self.held is not None:
            self.model.appendleft(self.held)
            self.held = None

    def teardown(self) -> None:
        self.reader.give_up()
        assert self.reader.pop_many(10_000) == list(self.model)
        self.ring.close()


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
