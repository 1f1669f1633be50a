"""Ring: frames of any size from one process to another through shared memory, without a system call on the way in.

One producer, one consumer. A frame is copied in, and becomes visible by one aligned 8-byte store of the head; after it
the doorbell is rung, always, so that a consumer may sleep in `poll` beside sockets and other rings (one ring per
producer, one doorbell per consumer). Every frame has a checksum over its position and content, so what a dead or mad
producer leaves behind is either a whole frame or nothing.

Delivery: in order, each frame once, as long as the consumer lives. A producer that dies in the middle of a frame leaves
no trace of it; the next producer goes on at the last committed frame. A frame is given up when the next one is asked
for, so the successor of a consumer that died over a frame sees that frame again (at least once).

Owns: the layout of the memory and the two counters. Knows nothing of what frames mean. Called by rollout workers, the
GPU worker and the trainer. Source: Lamport 1977, "Proving the Correctness of Multiprocess Programs", sec. 3.2 (one
writer per counter needs no lock).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from mmap import mmap
from time import monotonic

import xxhash

from .errors import ConfigError, DeadlineError, RingCorruptedError
from .memory import Doorbell, SharedMemory

PAGE_BYTES = 4096
MIN_CAPACITY_BYTES = PAGE_BYTES
MAX_CAPACITY_BYTES = 1 << 32
FRAME_HEADER_BYTES = 16
"""Length (u32), zero (u32), checksum (u64). Frames start at multiples of it, so that a header always fits."""
_MAGIC = int.from_bytes(b"UNIRING1", "little")
_MAGIC_WORD, _CAPACITY_WORD, _HEAD_WORD, _TAIL_WORD = 0, 1, 8, 16
"""Words of the first page; head and tail on cache lines of their own, each written by one side only."""
_SKIP = 0xFFFFFFFF
"""Length that means: the rest up to the end of the memory is unused, the next frame is at its start."""
_HEADER = struct.Struct("<IIQ")


class Ring:
    """The memory and the doorbells of one ring. Life: created by one side, its descriptors passed to the other."""

    def __init__(self, memory: SharedMemory, data: Doorbell, space: Doorbell, owns_data: bool = True) -> None:
        """Use `create` or `attach`."""
        self._memory = memory
        self._owns_data = owns_data
        self.data = data
        """Rung after every frame; wakes the consumer."""
        self.space = space
        """Rung after frames were taken; wakes a producer that waits for room."""
        self._pages: mmap = memory.map(writable=True)
        self.bytes = memoryview(self._pages)
        self.words = self.bytes[:PAGE_BYTES].cast("Q")
        self.capacity = int(self.words[_CAPACITY_WORD])
        is_ours = self.words[_MAGIC_WORD] == _MAGIC and self.capacity == memory.num_bytes - PAGE_BYTES
        if not is_ours or self.capacity % 8:
            self.close()
            raise RingCorruptedError("this memory is no ring, or one of another format; create a new one")

    @staticmethod
    def create(capacity_bytes: int, data: Doorbell | None = None) -> Ring:
        """Allocate a ring now; `data` is the consumer's doorbell where it has one for several rings (and closes it).

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
            page[: 2 * 8] = struct.pack("<QQ", _MAGIC, capacity)
        return Ring(memory, data or Doorbell.create(), Doorbell.create(), owns_data=data is None)

    @staticmethod
    def attach(fds: Sequence[int]) -> Ring:
        """The ring behind descriptors that came from another process (`fds` there); they are taken over.

        Raises:
            ArenaError, RingCorruptedError: they aren't a ring's.
        """
        memory_fd, data_fd, space_fd = fds
        data, space = Doorbell(data_fd), Doorbell(space_fd)
        try:
            return Ring(SharedMemory.attach(memory_fd, PAGE_BYTES + MIN_CAPACITY_BYTES), data, space)
        except BaseException:
            data.close()
            space.close()
            raise

    @property
    def fds(self) -> tuple[int, int, int]:
        """Descriptors to pass to the other side."""
        return self._memory.fd, self.data.fileno(), self.space.fileno()

    @property
    def max_frame_bytes(self) -> int:
        """Longest frame: with it, a ring that is half full still takes another."""
        return self.capacity // 2 - FRAME_HEADER_BYTES

    def check_distance(self, head: int, tail: int) -> None:
        """Raise RingCorruptedError unless the producer is ahead of the consumer by at most the capacity."""
        if not 0 <= head - tail <= self.capacity:
            raise RingCorruptedError(
                f"the producer stands at {head}, the consumer at {tail}, in a ring of {self.capacity} bytes"
            )

    def close(self) -> None:
        """Unmap, and give the descriptors back; a doorbell that was given to `create` stays its owner's."""
        self.words.release()
        self.bytes.release()
        self._pages.close()
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
        """Raises RingCorruptedError where the counters can't be."""
        self._ring = ring
        self._head = int(ring.words[_HEAD_WORD])
        self._tail = int(ring.words[_TAIL_WORD])
        ring.check_distance(self._head, self._tail)

    def try_push(self, frame: bytes | memoryview) -> bool:
        """Put one frame in, if there is room.

        Raises:
            ConfigError: it is longer than `max_frame_bytes`. RingCorruptedError: the consumer's counter is impossible.
        """
        ring, head, num_bytes = self._ring, self._head, len(frame)
        if num_bytes > ring.max_frame_bytes:
            raise ConfigError("frame", f"has {num_bytes} bytes; this ring takes at most {ring.max_frame_bytes}")
        capacity = ring.capacity
        needed = FRAME_HEADER_BYTES + (num_bytes + 15 & ~15)
        offset = head % capacity
        skipped = capacity - offset if offset + needed > capacity else 0
        if head + skipped + needed - self._tail > capacity:
            self._tail = int(ring.words[_TAIL_WORD])
            ring.check_distance(head, self._tail)
            if head + skipped + needed - self._tail > capacity:
                return False
        view = ring.bytes
        if skipped:
            _HEADER.pack_into(view, PAGE_BYTES + offset, _SKIP, 0, _checksum(head, b""))
            head, offset = head + skipped, 0
        start = PAGE_BYTES + offset
        _HEADER.pack_into(view, start, num_bytes, 0, _checksum(head, frame))
        view[start + FRAME_HEADER_BYTES : start + FRAME_HEADER_BYTES + num_bytes] = frame
        self._head = head + needed
        ring.words[_HEAD_WORD] = self._head  # the commit: one aligned 8-byte store
        ring.data.ring()
        return True

    def push(self, frame: bytes | memoryview, deadline_s: float) -> None:
        """Put one frame in, waiting for room.

        Raises:
            DeadlineError: the consumer took nothing for so long.
        """
        until_s = monotonic() + deadline_s
        while not self.try_push(frame):
            left_s = until_s - monotonic()
            if left_s <= 0 or not self._ring.space.wait(left_s):
                if self.try_push(frame):
                    return
                raise DeadlineError(
                    f"a frame of {len(frame)} bytes found no room within {deadline_s} s: the consumer takes nothing "
                    f"off the ring of {self._ring.capacity} bytes"
                )
            self._ring.space.clear()


class RingReader:
    """The consumer's side. One thread of one process at a time; a successor goes on at the last frame given up."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._head = self._tail = self._next = int(ring.words[_TAIL_WORD])

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
        ring, tail = self._ring, self._next
        if tail == self._head:
            self._head = int(ring.words[_HEAD_WORD])
            ring.check_distance(self._head, tail)
            if tail == self._head:
                return None
        num_bytes, checksum = self._header(tail)
        if num_bytes == _SKIP:
            if checksum != _checksum(tail, b""):
                raise RingCorruptedError(f"at {tail}: a skip with a wrong checksum")
            tail += ring.capacity - tail % ring.capacity
            if tail >= self._head:
                raise RingCorruptedError(f"at {tail}: a skip to beyond the producer's position {self._head}")
            num_bytes, checksum = self._header(tail)
        needed = FRAME_HEADER_BYTES + (num_bytes + 15 & ~15)
        offset = tail % ring.capacity
        if num_bytes > ring.max_frame_bytes or offset + needed > ring.capacity or tail + needed > self._head:
            raise RingCorruptedError(f"at {tail}: a frame of {num_bytes} bytes, which can't be there")
        start = PAGE_BYTES + offset + FRAME_HEADER_BYTES
        frame = bytes(ring.bytes[start : start + num_bytes])
        if checksum != _checksum(tail, frame):
            raise RingCorruptedError(f"at {tail}: a frame of {num_bytes} bytes with a wrong checksum")
        self._next = tail + needed
        return frame

    def pop_many(self, limit: int) -> list[bytes]:
        """Up to `limit` frames that are there now."""
        frames: list[bytes] = []
        while len(frames) < limit and (frame := self.pop()) is not None:
            frames.append(frame)
        return frames

    def give_up(self) -> None:
        """Done with the frames popped so far: free their room."""
        if self._next != self._tail:
            self._tail = self._next
            self._ring.words[_TAIL_WORD] = self._tail
            self._ring.space.ring()

    def wait(self, deadline_s: float) -> bool:
        """Sleep until a frame is there; False when `deadline_s` is over."""
        until_s = monotonic() + deadline_s
        while int(self._ring.words[_HEAD_WORD]) == self._next:
            left_s = until_s - monotonic()
            if left_s <= 0 or not self._ring.data.wait(left_s):
                return int(self._ring.words[_HEAD_WORD]) != self._next
            self._ring.data.clear()
        return True

    def _header(self, position: int) -> tuple[int, int]:
        offset = position % self._ring.capacity
        if offset % FRAME_HEADER_BYTES:
            raise RingCorruptedError(f"at {position}: no frame starts there")
        num_bytes, _, checksum = _HEADER.unpack_from(self._ring.bytes, PAGE_BYTES + offset)
        return int(num_bytes), int(checksum)


def _checksum(position: int, frame: bytes | memoryview) -> int:
    """XXH3 64 of the content, keyed by the position, so that an old frame is never taken for a new one."""
    return xxhash.xxh3_64_intdigest(frame, position & 0xFFFFFFFFFFFFFFFF)
