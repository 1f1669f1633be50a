"""The shared-memory ring: sizes, wrap-around, back-pressure, corruption, and death on either side."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from unison.ipc.errors import ArenaError, ConfigError, DeadlineError, RingCorruptedError
from unison.ipc.memory import Doorbell, SharedMemory
from unison.ipc.ring import PAGE_BYTES, Ring, RingReader, RingWriter


@pytest.fixture
def ring() -> Iterator[Ring]:
    with Ring.create(4096) as made:
        yield made


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 1000, 2032])
def test_frames_of_every_size(ring: Ring, num_bytes: int) -> None:
    writer, reader = RingWriter(ring), RingReader(ring)
    frame = random.Random(num_bytes).randbytes(num_bytes)
    for _ in range(20):
        assert writer.try_push(frame)
        assert reader.pop() == frame
        assert reader.pop() is None


def test_a_frame_that_can_never_fit_is_refused(ring: Ring) -> None:
    assert ring.max_frame_bytes == 2032
    with pytest.raises(ConfigError, match="2033 bytes; this ring takes at most 2032"):
        RingWriter(ring).try_push(bytes(2033))
    for capacity in (0, 4095, 1 << 33):
        with pytest.raises(ConfigError, match="capacity_bytes"):
            Ring.create(capacity)


@pytest.mark.parametrize("first_bytes", range(0, 400, 8))
def test_wrap_around_at_every_offset(ring: Ring, first_bytes: int) -> None:
    writer, reader = RingWriter(ring), RingReader(ring)
    rng = random.Random(first_bytes)
    writer.push(bytes(first_bytes), 1)
    assert reader.pop() == bytes(first_bytes)
    sent = [rng.randbytes(rng.randrange(0, 1500)) for _ in range(60)]
    got: list[bytes] = []
    waiting = list(sent)
    while len(got) < len(sent):
        while waiting and writer.try_push(waiting[0]):
            waiting.pop(0)
        got += reader.pop_many(3)
        reader.give_up()
    assert got == sent


def test_a_full_ring_holds_the_producer_back(ring: Ring) -> None:
    """P2: back-pressure with a deadline that says what it waited for; room comes back frame by frame."""
    writer, reader = RingWriter(ring), RingReader(ring)
    count = 0
    while writer.try_push(bytes(1000)):
        count += 1
    assert count == 4
    with pytest.raises(DeadlineError, match="1000 bytes found no room within 0.05 s"):
        writer.push(bytes(1000), 0.05)
    assert reader.pop() == bytes(1000) and reader.pop() == bytes(1000)
    writer.push(bytes(1000), 1)
    assert len(reader.pop_many(10)) == 3


def test_the_last_frame_is_seen_again_by_a_successor(ring: Ring) -> None:
    """P3: a consumer that dies over a frame loses nothing; its successor starts with that frame."""
    writer, first = RingWriter(ring), RingReader(ring)
    for at in range(3):
        writer.try_push(bytes([at]))
    assert first.pop() == b"\0" and first.pop() == b"\1"
    assert RingReader(ring).pop_many(9) == [b"\1", b"\2"]


def test_an_unfinished_frame_is_nothing(ring: Ring) -> None:
    """P3: what a producer wrote without committing is invisible, and its successor writes over it."""
    writer, reader = RingWriter(ring), RingReader(ring)
    writer.try_push(b"whole")
    head = int(ring.words[8])
    ring.bytes[PAGE_BYTES + head % 4096 : PAGE_BYTES + head % 4096 + 100] = bytes([0xAB]) * 100
    assert reader.pop_many(9) == [b"whole"]
    assert RingWriter(ring).try_push(b"next")
    assert reader.pop_many(9) == [b"next"]


@given(data=st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    """P43: a hostile or mad producer gets one typed error, never a wrong frame, a crash or an endless loop."""
    with Ring.create(4096) as ring:
        writer = RingWriter(ring)
        frames = data.draw(st.lists(st.binary(max_size=300), min_size=1, max_size=8))
        for frame in frames:
            writer.try_push(frame)
        at = data.draw(st.one_of(st.integers(64, 71), st.integers(PAGE_BYTES, PAGE_BYTES + int(ring.words[8]) - 1)))
        ring.bytes[at] ^= data.draw(st.integers(1, 255))
        got: list[bytes] = []
        try:
            reader = RingReader(ring)
            while (frame_ := reader.pop()) is not None:
                got.append(frame_)
        except RingCorruptedError:
            pass
        assert got == frames[: len(got)]


def test_impossible_positions_are_refused(ring: Ring) -> None:
    ring.words[8] = 1 << 40
    with pytest.raises(RingCorruptedError, match="stands at"):
        RingReader(ring).pop()
    ring.words[8], ring.words[16] = 0, 1 << 40
    with pytest.raises(RingCorruptedError, match="stands at"):
        RingWriter(ring)
    ring.words[16] = 0
    writer = RingWriter(ring)
    ring.words[16] = 1 << 40
    with pytest.raises(RingCorruptedError, match="stands at"):
        for _ in range(3):
            writer.try_push(bytes(2000))


def test_one_doorbell_for_several_rings() -> None:
    """One ring per producer, one doorbell per consumer."""
    bell = Doorbell.create()
    with Ring.create(4096, bell) as one, Ring.create(4096, bell) as two:
        for at, ring in enumerate((one, two)):
            assert RingWriter(ring).try_push(bytes([at]))
            assert bell.wait(0) and bell.clear()
        assert [RingReader(ring).pop() for ring in (one, two)] == [b"\0", b"\1"]
    assert bell.fileno() >= 0
    bell.ring()
    bell.close()


def test_other_memory_is_refused() -> None:
    memory, bells = SharedMemory.create("other", 65536), (Doorbell.create(), Doorbell.create())
    with pytest.raises(RingCorruptedError, match="no ring"):
        Ring.attach((memory.fd, *(bell.fileno() for bell in bells)))
    fd, bells = os.memfd_create("unsealed"), (Doorbell.create(), Doorbell.create())
    with pytest.raises(ArenaError, match="sealed"):
        Ring.attach((fd, *(bell.fileno() for bell in bells)))


def test_one_poll_for_sockets_and_rings(ring: Ring) -> None:
    """One poll waits for ZeroMQ and a ring together, and sleeps while neither has anything."""
    writer, reader = RingWriter(ring), RingReader(ring)
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind("inproc://x")
        poller = zmq.Poller()
        for source in (socket, reader.fileno()):
            poller.register(source, zmq.POLLIN)
        assert not poller.poll(0)
        writer.try_push(b"x")
        assert dict(poller.poll(1000)) == {reader.fileno(): zmq.POLLIN}
        reader.clear()
        assert reader.pop_many(9) == [b"x"] and not poller.poll(0)


def test_between_processes(ring: Ring) -> None:
    sent = [os.urandom(random.Random(at).randrange(0, 1800)) for at in range(2000)]
    pid = os.fork()
    if pid == 0:
        writer = RingWriter(ring)
        for frame in sent:
            writer.push(frame, 30)
        os._exit(0)
    reader, got = RingReader(ring), []
    while len(got) < len(sent):
        assert reader.wait(30)
        got += reader.pop_many(100)
        reader.give_up()
    assert os.waitpid(pid, 0)[1] == 0 and got == sent


@pytest.mark.parametrize("num_kills", [20, pytest.param(400, marks=pytest.mark.slow)])
def test_producers_that_are_killed_anywhere(num_kills: int) -> None:
    """P3: SIGKILL (and SIGSTOP before it) at any moment of a producer's life: every frame that comes out is whole and
    in order, and the next producer goes on."""
    rng = random.Random(num_kills)
    with Ring.create(1 << 16) as ring:
        reader = RingReader(ring)
        num_frames = 0
        for life in range(num_kills):
            pid = os.fork()
            if pid == 0:
                writer = RingWriter(ring)
                for at in range(1 << 30):
                    writer.push(b"%d %d " % (life, at) + bytes(at * 7919 % 9000), 30)
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


def test_a_waiting_reader_sleeps(ring: Ring) -> None:
    """A reader that waits is asleep in poll: no frame, no CPU."""
    started = time.process_time()
    assert not RingReader(ring).wait(0.3)
    assert time.process_time() - started < 0.05
    assert select.select([RingReader(ring)], [], [], 0)[0] == []
