"""Hostile frames against a live worker: it stays alive, everybody who can be answered gets a typed error, nothing
leaks, and a well-behaved client never notices."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import zmq
from harness.serving import WorkerThread, wait_until
from harness.tiny_directory import write_tiny_directory
from harness.tiny_model import assert_baseline
from unison.ipc.client import Client
from unison.ipc.messages import (
    CODEC,
    MESSAGES,
    CancelRequest,
    Failed,
    GetStatus,
    Hello,
    Ping,
    PinVersion,
    PublishWeights,
    ReserveBuffer,
    RollbackPolicy,
    SubmitRequest,
)  # fmt: skip
from unison.ipc.types import GenerateRequest, Manifest, PolicyVersion, SamplingParams
from unison.ipc.wire import MAX_FRAME_BYTES

LAST_CALL = 2**40
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**62, -(2**63), 0.5, float("nan"), float("inf"), "", "x" * 5000, b"", b"\0" * 4097,
    [], {}, [[]], {"a": 1}, [1] * 1000, "\ud7ff", -0.0,
)  # fmt: skip


class Attacker:
    """A DEALER that may or may not have introduced itself."""

    def __init__(self, worker: WorkerThread, is_welcome: bool) -> None:
        self.worker = worker
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 100_000)
        self.socket.connect(worker.address.endpoint)
        self.answers: list[Any] = []
        self.is_done = False
        if is_welcome:
            self.send(CODEC.encode(1, self.hello()))
            wait_until(self.listen, "the welcome")

    def hello(self, **changes: Any) -> Hello:
        address = self.worker.address
        fields = {"schema": CODEC.schema_digest, "token": address.token, "role": "user", "pid": 2**31 - 1,
                  "epoch": address.epoch} | changes  # fmt: skip
        return Hello(**fields)

    def send(self, *parts: bytes, lane: bytes = b"c") -> None:
        self.socket.send_multipart((lane, *parts))

    def listen(self) -> int:
        while self.socket.poll(0):
            call_id, answer = CODEC.decode(self.socket.recv_multipart()[-1])
            self.answers.append(answer)
            self.is_done |= call_id == LAST_CALL
        return len(self.answers)

    def has_ended(self) -> bool:
        self.listen()
        return self.is_done

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def valid_messages(worker: WorkerThread) -> list[Any]:
    """One or more of each kind that a client may send."""
    manifest = worker.arena.manifest(0)
    request = GenerateRequest("fuzz", (5, 6, 7), SamplingParams(max_tokens=2, seed=1, ignore_eos=True))
    return [
        SubmitRequest(request, True), CancelRequest("fuzz"), ReserveBuffer(0.0), Ping(), GetStatus(), PinVersion(0),
        RollbackPolicy(0), PublishWeights(PolicyVersion(9, "0" * 32), 1, manifest),
        PublishWeights(PolicyVersion(2**62, "zz"), 2**40, Manifest(())),
    ]  # fmt: skip


def frames(rng: random.Random, messages: list[Any]) -> Iterator[tuple[bytes, bytes]]:
    """(lane, frame) without end: random bytes, mutated and truncated frames, odd values, wrong tags and lanes."""
    encoded = [CODEC.encode(7, message) for message in messages]
    tags = [kind.__name__ for kind in MESSAGES] + ["", "Nothing", "__class__"]
    while True:
        lane = rng.choice((b"c", b"r"))
        kind = rng.randrange(6)
        frame = bytearray(rng.choice(encoded))
        if kind == 0:
            frame = bytearray(rng.randbytes(rng.randrange(0, 200)))
        elif kind == 1:
            for _ in range(rng.randrange(1, 4)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
        elif kind == 2:
            del frame[rng.randrange(len(frame)) :]
        elif kind == 3:
            call_id, tag, body = msgpack.unpackb(bytes(frame), strict_map_key=False)
            spoil(rng, body)
            frame = bytearray(msgpack.packb([call_id, tag, body]))
        elif kind == 4:
            frame = bytearray(msgpack.packb([rng.choice((1, 2**63 - 1, rng.randrange(1000))), rng.choice(tags),
                                             rng.choice(ODD[:-2])]))  # fmt: skip
        else:
            frame = bytearray(msgpack.packb(rng.choice(ODD[:-2])))
        yield lane, bytes(frame)


def spoil(rng: random.Random, body: dict[str, Any]) -> None:
    """Put something odd somewhere into a body."""
    where: Any = body
    while isinstance(where, dict) and where:
        key = rng.choice(list(where))
        if isinstance(where[key], dict) and rng.random() < 0.7:
            where = where[key]
            continue
        if rng.random() < 0.2:
            del where[key]
        elif rng.random() < 0.2:
            where["extra"] = rng.choice(ODD[:-2])
        else:
            where[key] = rng.choice(ODD[:-2])
        return


@pytest.mark.parametrize("num_frames", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_hostile_frames(tmp_path: Path, num_frames: int) -> None:
    """P43, P4: random and mutated frames, replays, wrong epochs and lanes; the worker serves on, bit for bit."""
    write_tiny_directory(tmp_path / "model")
    rng = random.Random(num_frames)
    greedy = SamplingParams(max_tokens=6, temperature=0, seed=1, ignore_eos=True)
    with WorkerThread(tmp_path / "r", tmp_path / "model", {}) as worker, Client.connect(worker.run_dir) as client:
        expected = client.generate([5, 6], greedy).completions
        source = frames(rng, valid_messages(worker))
        num_sent = num_answers = 0
        base = 0
        while num_sent < num_frames:
            attackers = [Attacker(worker, is_welcome) for is_welcome in (True, True, False)]
            for number in range(min(1000, num_frames - num_sent)):
                lane, frame = next(source)
                attacker = rng.choice(attackers)
                if number % 50 == 0:
                    attacker.send(CODEC.encode(1, attacker.hello(**{rng.choice(("epoch", "token", "schema")): "x"})))
                if number % 97 == 0:
                    attacker.socket.send_multipart([frame] * rng.randrange(1, 6))
                for _ in range(2 if number % 10 == 0 else 1):  # some are replayed
                    attacker.send(frame, lane=lane)
                num_sent += 1
                attacker.listen()
            for attacker in attackers:
                attacker.send(CODEC.encode(LAST_CALL, GetStatus()))
            for attacker in attackers:
                wait_until(attacker.has_ended, "everything before the last call to be handled")
            client.resume()  # an empty body under the right tag is a valid order to pause
            assert client.generate([5, 6], greedy, deadline_s=60).completions == expected
            for attacker in attackers:
                attacker.listen()
                num_answers += sum(isinstance(answer, Failed) for answer in attacker.answers)
                attacker.close()
            if num_sent == 3_000:
                base = psutil.Process().memory_info().rss
        assert num_answers > num_frames / 10, "senders were told what was wrong"
        wait_until(lambda: not worker.engine.has_work, "an idle engine")
        assert worker.fault is None
        assert [item.version.ordinal for item in worker.engine.versions] == [0]
        if num_frames > 10_000:
            assert psutil.Process().memory_info().rss - base < 64 << 20
        for peer in worker.worker._peers:  # whoever goes, gives back what it holds, as in any other life
            if peer.pid == 2**31 - 1:
                worker.worker._peers.lose(peer, "its test is over")
        wait_until(lambda: all(item.num_pins == 0 for item in worker.engine.versions), "no pins")
        assert_baseline(worker.engine)


def test_an_oversize_frame_costs_only_its_sender(tmp_path: Path) -> None:
    """P43: a frame beyond the limit ends its sender's connection before it takes memory; others go on."""
    write_tiny_directory(tmp_path / "model")
    with WorkerThread(tmp_path / "r", tmp_path / "model", {}) as worker, Client.connect(worker.run_dir) as client:
        attacker = Attacker(worker, True)
        attacker.send(bytes(MAX_FRAME_BYTES + 1))
        assert client.status().num_clients >= 1
        assert len(client.generate([5], SamplingParams(max_tokens=3, seed=1, ignore_eos=True)).completions) == 1
        attacker.close()
