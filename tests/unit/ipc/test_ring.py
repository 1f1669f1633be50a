"""The shared-memory ring: sizes, wrap-around, back-pressure and corruption."""

from __future__ import annotations

import os
import random
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import xxhash
import zmq
from hypothesis import given
from hypothesis import strategies as st
from unison.ipc.errors import ArenaError, ConfigError, DeadlineError, RingCorruptedError
from unison.ipc.memory import Doorbell, SharedMemory
from unison.ipc.ring import HEAD_WORD, PAGE_BYTES, TAIL_WORD, Ring, RingReader, RingWriter, wait_for_frames


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


@pytest.mark.parametrize("lap", [0, 1, 2**40, 2**51 - 1])
def test_wrap_around_at_every_offset(ring: Ring, lap: int) -> None:
    """From every position that a frame can start at, also after years: the counters are 64 bits wide and only grow."""
    for offset in range(0, 4096, 16):
        rng = random.Random(offset)
        ring.words[HEAD_WORD] = ring.words[TAIL_WORD] = lap * 4096 + offset
        writer, reader = RingWriter(ring), RingReader(ring)
        sent = [rng.randbytes(rng.choice((0, 1, 15, 16, 17, 1000, 2031, 2032))) for _ in range(12)]
        got: list[bytes] = []
        waiting = list(sent)
        while len(got) < len(sent):
            while waiting and writer.try_push(waiting[0]):
                waiting.pop(0)
            got += reader.pop_many(3)
        reader.give_up()
        assert got == sent and ring.words[HEAD_WORD] == ring.words[TAIL_WORD]


def test_a_full_ring_holds_the_producer_back(ring: Ring) -> None:
    """P2: back-pressure with a deadline that says what it waited for; room comes back frame by frame."""
    writer, reader = RingWriter(ring), RingReader(ring)
    count = 0
    while writer.try_push(bytes(1000)):
        count += 1
    assert count == 4
    with pytest.raises(DeadlineError, match="1000 bytes found no room within 0.05 s.*4096 bytes, 4096 of which"):
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


def test_what_one_call_gave_is_seen_again_as_a_whole(ring: Ring) -> None:
    """P3: a consumer that dies over a batch loses none of it; asking or waiting for more gives it up."""
    writer, reader = RingWriter(ring), RingReader(ring)
    for at in range(5):
        writer.try_push(bytes([at]))
    batch = [b"\0", b"\1", b"\2"]
    assert reader.pop_many(3) == batch
    reader = RingReader(ring)
    assert reader.pop_many(3) == batch and reader.pop_many(0) == []
    reader = RingReader(ring)
    assert reader.pop() == b"\3" and reader.wait(0)
    reader = RingReader(ring)
    assert reader.pop() == b"\4" and not reader.wait(0)
    assert RingReader(ring).pop() is None


def test_a_reader_that_waits_holds_no_room(ring: Ring) -> None:
    """The producer may need the very room of the frame that was popped last, wherever it lies."""
    writer, reader = RingWriter(ring), RingReader(ring)
    writer.push(b"", 1)
    assert reader.pop() == b""
    for at in range(1, 20):
        writer.push(bytes([at]) * ring.max_frame_bytes, 1)
        assert reader.pop() == bytes([at]) * ring.max_frame_bytes
        assert not reader.wait(0)


def test_what_a_limit_leaves_behind_keeps_the_bell_ringing(ring: Ring) -> None:
    writer, reader = RingWriter(ring), RingReader(ring)
    for at in range(3):
        writer.try_push(bytes([at]))
    seen = []
    while select.select([reader], [], [], 0)[0]:
        reader.clear()
        seen.append(reader.pop_many(2))
    assert seen == [[b"\0", b"\1"], [b"\2"]]


def test_room_wakes_a_producer_with_a_poll_loop_of_its_own(ring: Ring) -> None:
    writer, reader = RingWriter(ring), RingReader(ring)
    writer.try_push(b"first")
    assert reader.pop() == b"first" and reader.pop() is None
    assert not select.select([writer], [], [], 0)[0], "nobody waits, nobody is woken"
    while writer.try_push(bytes(1000)):
        pass
    reader.pop_many(9)
    assert not select.select([writer], [], [], 0)[0]
    reader.give_up()
    assert select.select([writer], [], [], 0)[0]
    writer.clear()
    assert writer.try_push(bytes(1000)) and reader.pop() and reader.pop() is None
    assert not select.select([writer], [], [], 0)[0]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: memoryview(data).cast("H")])
def test_anything_with_bytes_is_a_frame(ring: Ring, kind: Callable[[bytes], bytes]) -> None:
    writer, reader = RingWriter(ring), RingReader(ring)
    for num_bytes in (2, 2032):
        frame = random.Random(num_bytes).randbytes(num_bytes)
        writer.push(kind(frame), 1)
        assert reader.pop() == frame


def test_frames_before_the_damage_come_out(ring: Ring) -> None:
    """P43: and the error stays, however often one asks; the doorbell says that there is something to see."""
    writer, reader = RingWriter(ring), RingReader(ring)
    for at in range(3):
        writer.try_push(bytes([at]))
    ring.bytes[PAGE_BYTES + 2 * 32 + 16] ^= 1
    reader.clear()
    assert reader.pop_many(9) == [b"\0", b"\1"] and select.select([reader], [], [], 0)[0]
    for _ in range(3):
        with pytest.raises(RingCorruptedError, match="at 64: a frame of 1 bytes with a wrong checksum"):
            reader.pop_many(9)
        with pytest.raises(RingCorruptedError):
            reader.pop()


@given(data=st.binary(max_size=64), head=st.integers(0, 256), tail=st.integers(0, 256))
def test_random_memory_gives_no_frame(data: bytes, head: int, tail: int) -> None:
    """P43: whatever is in the memory, one typed error or nothing comes out of it."""
    with Ring.create(4096) as ring:
        ring.bytes[PAGE_BYTES:] = (data * 4096 + bytes(4096))[:4096]
        ring.words[HEAD_WORD], ring.words[TAIL_WORD] = head * 16, tail * 16
        try:
            assert RingReader(ring).pop_many(1000) == [] and head == tail
        except RingCorruptedError:
            assert head != tail


@given(num_bytes=st.one_of(st.integers(0, 5000), st.integers(0, 2**64 - 1)), tail=st.integers(0, 600))
def test_a_length_with_a_right_checksum_is_still_bounded(num_bytes: int, tail: int) -> None:
    """P43: a hostile producer can make checksums; it can't make the consumer read beyond what was committed."""
    with Ring.create(4096) as ring:
        position, offset = tail * 16, tail * 16 % 4096
        content = bytes(min(num_bytes, 4096))
        ring.words[HEAD_WORD], ring.words[TAIL_WORD] = position + 2048, position
        checksum = xxhash.xxh3_64_intdigest(content, position)
        struct.pack_into("=QQ", ring.bytes, PAGE_BYTES + offset, num_bytes, checksum)
        try:
            frame = RingReader(ring).pop()
            assert frame == content and num_bytes <= ring.max_frame_bytes and offset + 16 + num_bytes <= 4096
        except RingCorruptedError as error:
            assert num_bytes > ring.max_frame_bytes or offset + 16 + num_bytes > 4096, error


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
    reader = RingReader(ring)
    for position in (1 << 40, 8, 4112, 2**64 - 16):
        ring.words[8] = position
        with pytest.raises(RingCorruptedError, match=f"stands at {position}"):
            reader.pop()
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
        readers = [RingReader(ring) for ring in (one, two)]
        assert [reader.pop() for reader in readers] == [b"\0", b"\1"]
        assert not wait_for_frames(bell, readers, 0)
        assert not one.words[TAIL_WORD] == 0, "waiting gives up"
        late = threading.Timer(0.05, RingWriter(two).try_push, [b"late"])
        late.start()
        assert wait_for_frames(bell, readers, 30) and [reader.has_frame for reader in readers] == [False, True]
        late.join()
    assert bell.fileno() >= 0
    bell.ring()
    bell.close()


def test_other_memory_is_refused() -> None:
    memory, bells = SharedMemory.create("other", 65536), (Doorbell.create(), Doorbell.create())
    with pytest.raises(RingCorruptedError, match="no ring"):
        Ring.attach((memory.fd, *(bell.fileno() for bell in bells)))
    fake = SharedMemory.create("odd", PAGE_BYTES + 8200)
    with fake.map(writable=True) as pages:
        pages[:16] = b"UNIRING1" + (8200).to_bytes(8, "little")
    with pytest.raises(RingCorruptedError, match="no ring"):
        Ring.attach((fake.fd, os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)))
    with Ring.create(4096) as real:
        for wrong in (os.eventfd(0), os.open("/dev/null", os.O_RDONLY)):
            with pytest.raises(ArenaError, match="eventfd that doesn't block"):
                Ring.attach((os.dup(real.fds[0]), os.dup(real.fds[1]), wrong))
        for count in (1, 2, 4):
            with pytest.raises(RingCorruptedError, match=f"{count} descriptors came"):
                Ring.attach([os.dup(fd) for fd in (*real.fds, real.fds[2])[:count]])
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


def test_a_waiting_reader_sleeps(ring: Ring) -> None:
    """A reader that waits is asleep in poll: no frame, no CPU."""
    started = time.process_time()
    assert not RingReader(ring).wait(0.3)
    assert time.process_time() - started < 0.05
    assert select.select([RingReader(ring)], [], [], 0)[0] == []
