"""Ring: frames of any size from one process to another through shared memory; a system call only wakes who sleeps.

One producer, one consumer. A frame is copied in, and becomes visible by one aligned 8-byte store of the head; after it
the doorbell is rung, always, so that a consumer may sleep in `poll` beside sockets and other rings (one ring per
producer, one doorbell per consumer). Every frame has a checksum over its position and content, so what a dead or mad
producer leaves behind is either a whole frame or nothing. Each side's seat is a record lock, which dies with its
process: a second producer is refused while the first one lives.

Delivery: in order, each frame once, as long as the consumer lives. A producer that dies in the middle of a frame leaves
no trace of it; the next producer goes on at the last committed frame. Frames are given up when the next ones are asked
for or waited for, so the successor of a consumer that died over a frame (or over what one `pop_many` gave it) sees them
again: at least once. A consumer that sleeps in a poll loop of its own gives up first, since what it holds is room.

Two wake-ups can be lost: the one of a process that was killed between its store and its ring, and, on processors that
reorder a store with a later load, the one of a producer that waits for room. So whoever attaches rings for its
predecessor, and every wait here looks again after `LOOK_AGAIN_S`.

Owns: the layout of the memory and the two counters. Knows nothing of what frames mean. Called by rollout workers, the
GPU worker and the trainer. Source: Lamport 1977, "Proving the Correctness of Multiprocess Programs", sec. 3.2 (one
writer per counter needs no lock).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack, closing
from mmap import mmap
from time import monotonic

import xxhash

from .arena.locks import BufferLocks
from .errors import CapacityError, ConfigError, DeadlineError, RingCorruptedError
from .memory import Doorbell, SharedMemory

PAGE_BYTES = 4096
MIN_CAPACITY_BYTES = PAGE_BYTES
MAX_CAPACITY_BYTES = 1 << 32
FRAME_HEADER_BYTES = 16
"""Length (u64), checksum (u64). Frames start at multiples of it, so that a header always fits."""
LOOK_AGAIN_S = 0.25
"""Longest sleep between two looks at the counters."""
HEAD_WORD, TAIL_WORD = 8, 16
"""Words of the first page, on cache lines of their own, each written by one side only. Both only grow."""
_MAGIC = int.from_bytes(b"UNIRING1", "little")
"""What it is, and its format's version."""
_MAGIC_WORD, _CAPACITY_WORD, _WAITING_WORD = 0, 1, 9
"""The last one says that the producer waits for room; it is the producer's, beside the head."""
_SKIP = 0xFFFFFFFFFFFFFFFF
"""Length that means: the rest up to the end of the memory is unused, the next frame is at its start."""
_HEADER = struct.Struct("=QQ")
_PRODUCER, _CONSUMER = 0, 1
_NUM_READS = 10
"""Looks at a frame before it is called corrupt: not every processor shows another's stores in their order at once."""


class Ring:
    """The memory and the doorbells of one ring. Life: created by one side, its descriptors passed to the other."""

    def __init__(self, memory: SharedMemory, data: Doorbell, space: Doorbell, owns_data: bool = True) -> None:
        """Use `create` or `attach`; what is passed belongs to the ring, also where this raises."""
        self._memory = memory
        self._owns_data = owns_data
        self._seats: dict[int, tuple[int, BufferLocks]] = {}
        self.data = data
        """Rung after every frame; wakes the consumer."""
        self.space = space
        """Rung after frames were given up while the producer waits for room; wakes it."""
        self.pages: mmap = memory.map(writable=True)
        self.bytes = memoryview(self.pages)
        self.words = self.bytes[:PAGE_BYTES].cast("Q")
        self.capacity = int(self.words[_CAPACITY_WORD])
        is_ours = self.words[_MAGIC_WORD] == _MAGIC and self.capacity == memory.num_bytes - PAGE_BYTES
        if not is_ours or self.capacity % PAGE_BYTES:
            self.close()
            raise RingCorruptedError("this memory is no ring, or one of another format; create a new one")

    @staticmethod
    def create(capacity_bytes: int, data: Doorbell | None = None) -> Ring:
        """Allocate a ring of whole pages; `data` is the consumer's doorbell where it has one for several rings.

        Raises:
            ConfigError: the capacity is out of bounds. CapacityError: there is no memory for it.
        """
        if not MIN_CAPACITY_BYTES <= capacity_bytes <= MAX_CAPACITY_BYTES:
            raise ConfigError(
                "capacity_bytes", f"is {capacity_bytes}; must be in [{MIN_CAPACITY_BYTES}, {MAX_CAPACITY_BYTES}]"
            )
        capacity = -(-capacity_bytes // PAGE_BYTES) * PAGE_BYTES
        memory = SharedMemory.create("unison-ring", PAGE_BYTES + capacity)
        with memory.map(writable=True, length=PAGE_BYTES) as page:
            page[: 2 * 8] = struct.pack("=QQ", _MAGIC, capacity)
        return Ring(memory, data or Doorbell.create(), Doorbell.create(), owns_data=data is None)

    @staticmethod
    def attach(fds: Sequence[int]) -> Ring:
        """The ring behind descriptors that came from another process (`fds` there); they are taken over.

        Raises:
            ArenaError, RingCorruptedError: they aren't a ring's; they are closed.
        """
        with ExitStack() as undone:
            bells = [undone.enter_context(closing(Doorbell(fd))) for fd in fds[1:]]
            memory = undone.enter_context(SharedMemory.attach(fds[0], PAGE_BYTES + MIN_CAPACITY_BYTES))
            if len(bells) != 2:
                raise RingCorruptedError(f"{len(fds)} descriptors came; a ring has its memory and two doorbells")
            for bell in bells:
                bell.check()
            ring = Ring(memory, bells[0], bells[1])
            undone.pop_all()
        return ring

    @property
    def fds(self) -> tuple[int, int, int]:
        """Descriptors to pass to the other side."""
        return self._memory.fd, self.data.fileno(), self.space.fileno()

    @property
    def max_frame_bytes(self) -> int:
        """Longest frame: wherever it must start, an empty ring takes it."""
        return self.capacity // 2 - FRAME_HEADER_BYTES

    def distance(self) -> tuple[int, int]:
        """Where the producer and the consumer stand, checked."""
        tail = int(self.words[TAIL_WORD])  # first, so that it can't pass the head meanwhile
        head = int(self.words[HEAD_WORD])
        self.check_distance(head, tail)
        return head, tail

    def check_distance(self, head: int, tail: int) -> None:
        """Raise RingCorruptedError unless both can be and the producer is ahead by at most the capacity."""
        if not 0 <= head - tail <= self.capacity or head % FRAME_HEADER_BYTES or tail % FRAME_HEADER_BYTES:
            raise RingCorruptedError(
                f"the producer stands at {head}, the consumer at {tail}, in a ring of {self.capacity} bytes"
            )

    def take_seat(self, seat: int, name: str) -> None:
        """Become the one producer or consumer; given back by `close` and by the process's end.

        Raises CapacityError where another ring object, here or in another process, has the seat.
        """
        pid, held = self._seats.get(seat, (0, None))
        if pid == os.getpid():
            return
        if held is not None:
            held.close()  # inherited by fork: the parent's own descriptor still holds it
        locks = BufferLocks(self._memory.fd)
        if not locks.try_exclusive(seat):
            locks.close()
            raise CapacityError(
                f"the ring has a {name} already, and it lives; a ring has one: end that one first, or use a ring more"
            )
        self._seats[seat] = (os.getpid(), locks)

    def close(self) -> None:
        """Unmap, and give seats and descriptors back; a doorbell that was given to `create` stays its owner's."""
        while self._seats:
            self._seats.popitem()[1][1].close()
        self.words.release()
        self.bytes.release()
        self.pages.close()
        self._memory.close()
        if self._owns_data:
            self.data.close()
        self.space.close()

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RingWriter:
    """The producer's side. One thread of one process at a time; a successor goes on at the last committed frame."""

    def __init__(self, ring: Ring) -> None:
        """Take the producer's seat.

        Raises:
            CapacityError: another producer lives. RingCorruptedError: the counters can't be.
        """
        ring.take_seat(_PRODUCER, "producer")
        self._ring = ring
        self._head, self._tail = ring.distance()
        self._is_waiting = False
        ring.words[_WAITING_WORD] = 0
        if self._head != self._tail:
            ring.data.ring()

    def fileno(self) -> int:
        """For a poll loop: readable when room was made after `try_push` had found none; `clear` it, then try again."""
        return self._ring.space.fileno()

    def clear(self) -> None:
        """Forget the ringing so far."""
        self._ring.space.clear()

    def try_push(self, frame: bytes | bytearray | memoryview) -> bool:
        """Put one frame in, if there is room; nobody may change it meanwhile.

        Raises:
            ConfigError: it is longer than `max_frame_bytes`. RingCorruptedError: the consumer's counter is impossible.
        """
        if type(frame) is not bytes:
            frame = memoryview(frame).cast("B")
        ring, head, num_bytes = self._ring, self._head, len(frame)
        capacity = ring.capacity
        needed = FRAME_HEADER_BYTES + (num_bytes + 15 & ~15)
        if needed > capacity // 2:
            raise ConfigError("frame", f"has {num_bytes} bytes; this ring takes at most {ring.max_frame_bytes}")
        offset = head % capacity
        skipped = capacity - offset if offset + needed > capacity else 0
        if head + skipped + needed - self._tail > capacity and not self._has_room(skipped + needed):
            return False
        if skipped:
            _HEADER.pack_into(ring.pages, PAGE_BYTES + offset, _SKIP, _checksum(b"", head))
            head, offset = head + skipped, 0
        start = PAGE_BYTES + offset
        _HEADER.pack_into(ring.pages, start, num_bytes, _checksum(frame, head))
        start += FRAME_HEADER_BYTES
        ring.bytes[start : start + num_bytes] = frame
        self._head = head + needed
        ring.words[HEAD_WORD] = self._head  # the commit: one aligned 8-byte store
        ring.data.ring()
        return True

    def push(self, frame: bytes | bytearray | memoryview, deadline_s: float) -> None:
        """Put one frame in, waiting for room.

        Raises:
            DeadlineError: the consumer gave up nothing for so long.
        """
        if self.try_push(frame):
            return
        space, until_s = self._ring.space, monotonic() + deadline_s
        while not self.try_push(frame):
            left_s = until_s - monotonic()
            if left_s <= 0:
                raise DeadlineError(
                    f"a frame of {len(frame)} bytes found no room within {deadline_s} s: the consumer takes nothing "
                    f"off the ring of {self._ring.capacity} bytes, {self._head - self._tail} of which are in use"
                )
            if space.wait(min(left_s, LOOK_AGAIN_S)):
                space.clear()

    def _has_room(self, needed: int) -> bool:
        """Look at the consumer's counter, and once more after having asked it to ring."""
        ring, head = self._ring, self._head
        for is_asking in (True, False):
            self._tail = int(ring.words[TAIL_WORD])
            ring.check_distance(head, self._tail)
            if head + needed - self._tail <= ring.capacity:
                if self._is_waiting:
                    ring.words[_WAITING_WORD] = 0
                    self._is_waiting = False
                return True
            if is_asking:
                ring.words[_WAITING_WORD] = 1
                self._is_waiting = True
        return False


class RingReader:
    """The consumer's side. One thread of one process at a time; a successor goes on at the last frame given up."""

    def __init__(self, ring: Ring) -> None:
        """Take the consumer's seat.

        Raises:
            CapacityError: another consumer lives. RingCorruptedError: the counters can't be.
        """
        ring.take_seat(_CONSUMER, "consumer")
        self._ring = ring
        _, self._tail = ring.distance()
        self._head = self._next = self._tail
        if ring.words[_WAITING_WORD]:
            ring.space.ring()

    @property
    def has_frame(self) -> bool:
        """True where `pop` would give a frame (or find that the ring is corrupt)."""
        return int(self._ring.words[HEAD_WORD]) != self._next

    def fileno(self) -> int:
        """For a poll loop: readable after a frame was put in; `clear` it before taking frames."""
        return self._ring.data.fileno()

    def clear(self) -> None:
        """Forget the ringing so far. Take frames until there are none after it, never before."""
        self._ring.data.clear()

    def pop(self) -> bytes | None:
        """The next frame, or None. The one before it is given up now: its room is free for the producer.

        Raises:
            RingCorruptedError: there is something that no producer of ours writes; the ring can't be used any more.
        """
        self.give_up()
        return self._take()

    def pop_many(self, limit: int) -> list[bytes]:
        """Up to `limit` frames that are there now; all are given up together at the next call.

        Where some are left behind, the doorbell is rung, so that the next poll comes back at once.

        Raises:
            RingCorruptedError: as `pop`; what came before the damage is returned first.
        """
        self.give_up()
        frames: list[bytes] = []
        while len(frames) < limit:
            try:
                frame = self._take()
            except RingCorruptedError:
                if not frames:
                    raise
                break
            if frame is None:
                return frames
            frames.append(frame)
        if self.has_frame:
            self._ring.data.ring()
        return frames

    def give_up(self) -> None:
        """Done with the frames popped so far: free their room. `pop`, `pop_many` and `wait` do it by themselves."""
        if self._next != self._tail:
            self._tail = self._next
            words = self._ring.words
            words[TAIL_WORD] = self._tail
            if words[_WAITING_WORD]:
                self._ring.space.ring()

    def wait(self, deadline_s: float) -> bool:
        """Sleep until a frame is there; False when `deadline_s` is over. For a consumer of this ring alone."""
        return wait_for_frames(self._ring.data, (self,), deadline_s)

    def _take(self) -> bytes | None:
        position = self._next
        if position == self._head:
            head = int(self._ring.words[HEAD_WORD])
            if head == position:
                return None
            self._ring.check_distance(head, position)
            self._head = head
        for _ in range(_NUM_READS - 1):
            try:
                return self._read(position)
            except RingCorruptedError:
                os.sched_yield()
        return self._read(position)

    def _read(self, position: int) -> bytes:
        """The frame at `position`; nothing that is read there is trusted before it was compared with the bounds."""
        ring = self._ring
        pages, capacity = ring.pages, ring.capacity
        offset = position % capacity
        num_bytes, checksum = _HEADER.unpack_from(pages, PAGE_BYTES + offset)
        if num_bytes == _SKIP:
            if checksum != _checksum(b"", position):
                raise RingCorruptedError(f"at {position}: a skip with a wrong checksum")
            position += capacity - offset
            if position >= self._head:
                raise RingCorruptedError(f"at {position}: a skip to beyond the producer's position {self._head}")
            offset = 0
            num_bytes, checksum = _HEADER.unpack_from(pages, PAGE_BYTES)
        end = position + FRAME_HEADER_BYTES + (num_bytes + 15 & ~15)
        if end > self._head or offset + end - position > capacity or end - position > capacity // 2:
            raise RingCorruptedError(f"at {position}: a frame of {num_bytes} bytes, which can't be there")
        start = PAGE_BYTES + FRAME_HEADER_BYTES + offset
        frame = pages[start : start + num_bytes]
        if checksum != _checksum(frame, position):
            raise RingCorruptedError(f"at {position}: a frame of {num_bytes} bytes with a wrong checksum")
        self._next = end
        return frame


def wait_for_frames(bell: Doorbell, readers: Sequence[RingReader], deadline_s: float) -> bool:
    """Sleep until one of the rings behind one doorbell has a frame; False when `deadline_s` is over.

    Frames popped before are given up: a consumer that holds on to them may keep the room that its producer waits for.
    """
    until_s = monotonic() + deadline_s
    for reader in readers:
        reader.give_up()
    while not any(reader.has_frame for reader in readers):
        left_s = until_s - monotonic()
        if left_s <= 0:
            return False
        if bell.wait(min(left_s, LOOK_AGAIN_S)):
            bell.clear()
    return True


def _checksum(frame: bytes | bytearray | memoryview, position: int) -> int:
    """XXH3 64 of the content, keyed by the position, so that an old frame is never taken for a new one."""
    return xxhash.xxh3_64_intdigest(frame, position)
