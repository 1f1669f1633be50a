"""The ring's own speed: frames per second and round trips between two processes, and what a waiting reader costs.

Owns: the measurement. Called by `bin/bench walls`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ...ipc.errors import ProcessFailedError
from ...ipc.ring import Ring, RingReader, RingWriter

CAPACITY_BYTES = 1 << 20
WAIT_S = 60.0
NUM_ROUND_TRIPS = 5000


def measure_ring(num_frames: int, frame_bytes: int) -> dict[str, float]:
    """Frames of one size: one way, there and back, and idle."""
    return {
        "frames/s": _one_way(num_frames, frame_bytes),
        **_round_trips(frame_bytes),
        "idle CPU of a waiting reader": _idle_share(),
    }


def _one_way(num_frames: int, frame_bytes: int) -> float:
    with Ring.create(CAPACITY_BYTES) as ring:
        pid = _fork(lambda: _send(ring, num_frames, frame_bytes))
        reader, got = RingReader(ring), 0
        reader.wait(WAIT_S)
        started = time.perf_counter()
        while got < num_frames:
            frames = reader.pop_many(1000)
            got += len(frames)
            if not frames and not reader.wait(WAIT_S):
                break
        seconds = time.perf_counter() - started
        _join(pid)
    return num_frames / seconds


def _round_trips(frame_bytes: int) -> dict[str, float]:
    with Ring.create(CAPACITY_BYTES) as there, Ring.create(CAPACITY_BYTES) as back:
        pid = _fork(lambda: _echo(there, back))
        writer, reader, frame, times_s = RingWriter(there), RingReader(back), bytes(frame_bytes), []
        for _ in range(NUM_ROUND_TRIPS):
            started = time.perf_counter()
            writer.push(frame, WAIT_S)
            reader.wait(WAIT_S)
            reader.pop()
            times_s.append(time.perf_counter() - started)
        _join(pid)
    times_s.sort()
    return {
        "round trip p50 us": times_s[len(times_s) // 2] * 1e6,
        "round trip p99 us": times_s[int(len(times_s) * 0.99)] * 1e6,
    }


def _idle_share() -> float:
    with Ring.create(CAPACITY_BYTES) as ring:
        reader = RingReader(ring)
        wall, cpu = time.perf_counter(), time.thread_time()
        reader.wait(2.0)
        return (time.thread_time() - cpu) / (time.perf_counter() - wall)


def _send(ring: Ring, num_frames: int, frame_bytes: int) -> None:
    writer, frame = RingWriter(ring), bytes(frame_bytes)
    for _ in range(num_frames):
        writer.push(frame, WAIT_S)


def _echo(there: Ring, back: Ring) -> None:
    reader, writer = RingReader(there), RingWriter(back)
    for _ in range(NUM_ROUND_TRIPS):
        reader.wait(WAIT_S)
        writer.push(reader.pop() or b"", WAIT_S)


def _fork(work: Callable[[], None]) -> int:
    """A process that does `work` and ends there, also where it raises: the rest of this program is not for it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def _join(pid: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise ProcessFailedError(f"the other side of the ring ended with {code}; its figures are worth nothing")
