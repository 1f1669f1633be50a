"""The ring against a deque, with both sides dying and being replaced at any time."""

from __future__ import annotations

from collections import deque

from harness.examples import num_examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from unison.ipc.ring import HEAD_WORD, PAGE_BYTES, TAIL_WORD, Ring, RingReader, RingWriter


class RingMachine(RuleBasedStateMachine):
    """P3: no frame is lost, none is torn, none comes twice but those that their reader died over."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring.create(4096)
        self.writer, self.reader = RingWriter(self.ring), RingReader(self.ring)
        self.model: deque[bytes] = deque()
        self.held: list[bytes] = []
        """What was popped and not given up; the next reader would see it again."""

    @rule(frame=st.binary(max_size=1200))
    def push(self, frame: bytes) -> None:
        if self.writer.try_push(frame):
            self.model.append(frame)
        else:
            assert self.model or self.held, "an empty ring takes any frame"

    @rule()
    def pop(self) -> None:
        frame = self.reader.pop()
        assert frame == (self.model.popleft() if self.model else None)
        self.held = [] if frame is None else [frame]

    @rule(limit=st.integers(0, 5))
    def pop_many(self, limit: int) -> None:
        self.held = self.reader.pop_many(limit)
        assert self.held == [self.model.popleft() for _ in range(min(limit, len(self.model)))]

    @rule()
    def give_up(self) -> None:
        self.reader.give_up()
        self.held = []

    @rule()
    def wait(self) -> None:
        assert self.reader.wait(0) == bool(self.model)
        self.held = []

    @rule()
    def producer_dies(self) -> None:
        self.writer = RingWriter(self.ring)

    @rule(garbage=st.binary(min_size=1, max_size=200))
    def producer_dies_in_a_frame(self, garbage: bytes) -> None:
        room = 4096 - (int(self.ring.words[HEAD_WORD]) - int(self.ring.words[TAIL_WORD]))
        offset = int(self.ring.words[HEAD_WORD]) % 4096
        torn = garbage[: min(room, 4096 - offset)]
        self.ring.bytes[PAGE_BYTES + offset : PAGE_BYTES + offset + len(torn)] = torn
        self.writer = RingWriter(self.ring)

    @rule()
    def consumer_dies(self) -> None:
        self.reader = RingReader(self.ring)
        self.model.extendleft(reversed(self.held))
        self.held = []

    @invariant()
    def counters_agree(self) -> None:
        head, tail = self.ring.distance()
        assert self.reader.has_frame == bool(self.model)
        assert (head == tail) == (not self.model and not self.held)

    def teardown(self) -> None:
        self.reader.give_up()
        assert self.reader.pop_many(10_000) == list(self.model)
        self.ring.close()


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=num_examples(60), stateful_step_count=40, deadline=None)
