"""The ring between processes that are stopped, killed and replaced at any moment."""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from unison.ipc.errors import CapacityError
from unison.ipc.memory import Doorbell
from unison.ipc.ring import HEAD_WORD, TAIL_WORD, Ring, RingReader, RingWriter


def child(work: Callable[[], object]) -> int:
    """Fork a process that does `work` and ends, with 0 where nothing was raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


@pytest.fixture
def ring() -> Iterator[Ring]:
    with Ring.create(4096) as made:
        yield made


def test_each_side_has_one_living_process(ring: Ring) -> None:
    """A second producer or consumer is refused while the first lives, and welcome when it is dead."""
    first = Ring.attach([os.dup(fd) for fd in ring.fds])
    RingWriter(first)
    RingReader(first)
    with pytest.raises(CapacityError, match="has a producer already"):
        RingWriter(ring)
    with pytest.raises(CapacityError, match="has a consumer already"):
        RingReader(ring)
    pid = child(lambda: pytest.raises(CapacityError, RingWriter, ring))
    assert os.waitpid(pid, 0)[1] == 0
    first.close()
    writer, reader = RingWriter(ring), RingReader(ring)
    assert writer.try_push(b"x") and reader.pop() == b"x"


def test_a_stopped_producer_keeps_its_seat_and_a_killed_one_does_not(ring: Ring) -> None:
    """P3: SIGSTOP is no death; SIGKILL is, and nothing has to be cleaned up after it."""
    pid = child(lambda: (RingWriter(ring).push(b"here", 30), signal.pause()))
    reader = RingReader(ring)
    assert reader.wait(30) and reader.pop() == b"here"
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    with pytest.raises(CapacityError):
        RingWriter(ring)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert RingWriter(ring).try_push(b"next") and reader.pop() == b"next"


@pytest.mark.parametrize("lost", ["data", "space"])
def test_a_ringing_that_died_with_its_process(ring: Ring, lost: str) -> None:
    """P2, P3: killed between its store and its ring, a process leaves a silent frame or room; a wait finds it."""
    writer, reader = RingWriter(ring), RingReader(ring)
    while writer.try_push(bytes(1000)):
        pass
    ring.data.clear()
    if lost == "data":
        assert reader.wait(30) and reader.pop() == bytes(1000)
        RingWriter(ring)
        assert ring.data.wait(0), "who attaches rings for its predecessor"
        return
    pid = child(lambda: ring.words.__setitem__(TAIL_WORD, ring.words[HEAD_WORD]))
    writer.push(bytes(1000), 30)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_frame_without_a_ring_ends_a_wait_that_has_begun(ring: Ring) -> None:
    """P2: the same while the consumer sleeps already."""
    reader = RingReader(ring)

    def deaf_producer() -> None:
        ring.data = Doorbell.create()  # rings, and nobody hears
        while " S " not in Path(f"/proc/{os.getppid()}/stat").read_text():
            os.sched_yield()
        RingWriter(ring).try_push(b"silent")

    pid = child(deaf_producer)
    assert reader.wait(30) and reader.pop() == b"silent"
    assert os.waitpid(pid, 0)[1] == 0


def test_between_processes(ring: Ring) -> None:
    sent = [os.urandom(random.Random(at).randrange(0, 1800)) for at in range(2000)]
    def producer() -> None:
        writer = RingWriter(ring)
        for frame in sent:
            writer.push(frame, 30)

    pid = child(producer)
    reader, got = RingReader(ring), []
    while len(got) < len(sent):
        assert reader.wait(30)
        got += reader.pop_many(100)
        reader.give_up()
    assert os.waitpid(pid, 0)[1] == 0 and got == sent


def produce_for_ever(ring: Ring, life: int) -> None:
    writer = RingWriter(ring)
    for at in range(1 << 30):
        writer.push(b"%d %d " % (life, at) + bytes(at * 7919 % 9000), 30)


@pytest.mark.parametrize("num_consumers", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_consumers_that_are_killed_anywhere(num_consumers: int) -> None:
    """P3: each successor goes on with what its predecessor died over: nothing is lost, and what comes twice comes in
    one piece."""
    rng, (reading, writing) = random.Random(num_consumers), os.pipe()

    def consume(ring: Ring) -> None:
        reader = RingReader(ring)
        while reader.wait(30):
            for frame in reader.pop_many(7):
                os.write(writing, struct.pack("=Q", int(frame.split(b" ")[1])))

    with Ring.create(1 << 16) as ring:
        producer = child(partial(produce_for_ever, ring, 0))
        next_number, num_again = 0, 0
        for _ in range(num_consumers):
            pid = child(partial(consume, ring))
            select.select([reading], [], [], 30)
            until_s, numbers = time.monotonic() + rng.random() * 0.02, b""
            while time.monotonic() < until_s:
                numbers += os.read(reading, 1 << 16) if select.select([reading], [], [], 0.001)[0] else b""
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            while select.select([reading], [], [], 0)[0]:
                numbers += os.read(reading, 1 << 16)
            seen = [number for (number,) in struct.iter_unpack("=Q", numbers)]
            assert seen == list(range(seen[0], seen[0] + len(seen)))
            assert next_number - 7 <= seen[0] <= next_number
            num_again += next_number - seen[0]
            next_number = seen[-1] + 1
        os.kill(producer, signal.SIGKILL)
        os.waitpid(producer, 0)
    os.close(reading)
    os.close(writing)
    assert next_number > num_consumers and num_again <= 7 * num_consumers


@pytest.mark.parametrize("num_kills", [20, pytest.param(400, marks=pytest.mark.slow)])
def test_producers_that_are_killed_anywhere(num_kills: int) -> None:
    """P3: SIGKILL (and SIGSTOP before it) at any moment of a producer's life: every frame that comes out is whole and
    in order, and the next producer goes on."""
    rng = random.Random(num_kills)
    with Ring.create(1 << 16) as ring:
        reader = RingReader(ring)
        num_frames = 0
        for life in range(num_kills):
            pid = child(partial(produce_for_ever, ring, life))
            until_s, expected = time.monotonic() + rng.random() * 0.02, 0
            is_killed = False
            while True:
                frame = reader.pop()
                if frame is not None:
                    number, at, _ = frame.split(b" ", 2)
                    assert (int(number), int(at)) == (life, expected)
                    expected += 1
                    num_frames += 1
                elif is_killed:
                    break
                else:
                    reader.wait(0.001)
                if not is_killed and time.monotonic() > until_s:
                    if life % 5 == 0:
                        os.kill(pid, signal.SIGSTOP)
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    is_killed = True
        assert num_frames > 10 * num_kills
