"""Peers: handshake, retries, silence, and what a lost peer leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from harness.serving import wait_until
from unison.ipc.channel import Listener
from unison.ipc.errors import HandshakeError
from unison.ipc.messages import CODEC, Acknowledged, Failed, Hello, Pong
from unison.workers.gpu.peers import Peer, Peers


class Wire:
    """A listener with peers, and one DEALER on it."""

    def __init__(self, directory: Path) -> None:
        self.listener = Listener(f"ipc://{directory}/w.sock")
        self.peers = Peers(self.listener, "token", "epoch", silence_s=10.0)
        self.context = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(self.listener.endpoint)
        self.dealer.send_multipart((b"c", b"hi"))
        (self.first,) = wait_until(lambda: self.listener.drain(10), "a message")

    def hello(self, **changes: object) -> Hello:
        fields = {"schema": CODEC.schema_digest, "token": "token", "role": "user", "pid": os.getpid(),
                  "epoch": "epoch"} | changes  # fmt: skip
        return Hello(**fields)  # type: ignore[arg-type]

    def welcome(self, **changes: object) -> Peer:
        return self.peers.welcome(self.first.peer, self.hello(**changes), now_s=0.0)

    def receive(self) -> tuple[int, object]:
        assert self.dealer.poll(10_000)
        return CODEC.decode(self.dealer.recv())

    def close(self) -> None:
        self.peers.close()
        self.dealer.close()
        self.context.term()
        self.listener.close()


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    made = Wire(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("field", ["token", "schema", "epoch"])
def test_only_who_belongs_to_the_run_is_welcome(wire: Wire, field: str) -> None:
    """P43: token, schema and epoch have to be this run's."""
    with pytest.raises(HandshakeError, match=field):
        wire.welcome(**{field: "other"})
    assert len(wire.peers) == 0


def test_a_call_is_answered_again_and_not_acted_on_again(wire: Wire) -> None:
    """P2, P29: a call id that was seen is a retry; its answer, if there is one, is sent once more."""
    peer = wire.welcome()
    assert not wire.peers.is_retry(peer, 3)
    assert wire.peers.is_retry(peer, 3), "not answered yet: nothing to send, nothing to do"
    wire.peers.answer(peer, 3, Acknowledged())
    assert wire.peers.is_retry(peer, 3)
    assert [wire.receive() for _ in range(2)] == [(3, Acknowledged())] * 2
    assert not wire.peers.is_retry(peer, 0), "call 0 is nobody's"


def test_a_silent_peer_is_dropped_and_told(wire: Wire) -> None:
    """P36: who says nothing for too long is lost with what it held, and learns it."""
    peer = wire.welcome()
    peer.pins[4] += 1
    wire.peers.look_after(now_s=9.0)
    assert wire.peers.take_gone() == []
    wire.peers.look_after(now_s=10.5)
    assert wire.peers.take_gone() == [peer] and wire.peers.get(peer.identity) is None
    call_id, told = wire.receive()
    assert call_id == 0 and isinstance(told, Failed) and told.code == "handshake_refused"


def test_a_dead_process_is_seen_at_once(wire: Wire) -> None:
    """P34, P42: the peer's process is watched, not its socket."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    peer = wire.welcome(pid=pid)
    os.waitpid(pid, 0)
    wire.peers.look_after(now_s=0.1)
    assert wire.peers.take_gone() == [peer]


@pytest.mark.parametrize("pid", [2**62, 2**31 - 1, -5, 0])
def test_a_pid_that_cannot_be_watched_is_no_trouble(wire: Wire, pid: int) -> None:
    assert wire.welcome(pid=pid).pidfd == -1
    wire.peers.look_after(now_s=1.0)
    assert len(wire.peers) == 1


def test_a_peer_that_is_not_there_any_more_is_lost(wire: Wire) -> None:
    peer = wire.welcome()
    wire.dealer.close()

    def gone() -> list[Peer]:
        wire.peers.tell(peer, Pong())
        return wire.peers.take_gone()

    assert wait_until(gone, "the send to fail") == [peer]
    wire.dealer = wire.context.socket(zmq.DEALER)


def test_remembered_answers_are_bounded(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: a retry of a call whose answer isn't kept any more is told so, and the call isn't carried out again."""
    monkeypatch.setattr("unison.workers.gpu.peers.MAX_ANSWER_BYTES", 3000)
    peer = wire.welcome()
    for call_id in range(1, 6):
        assert not wire.peers.is_retry(peer, call_id)
        wire.peers.answer(peer, call_id, Failed("x", "y" * 1000, {}))
        wire.receive()
    assert peer.num_answer_bytes <= 3000 + 1000
    assert peer.num_answer_bytes == sum(len(frame or b"") for frame in peer.answers.values())
    assert wire.peers.is_retry(peer, 1)
    call_id, message = wire.receive()
    assert call_id == 1 and isinstance(message, Failed) and message.code == "request_failed"
