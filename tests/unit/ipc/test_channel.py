"""Listener and Dialer over real sockets: lanes, full queues, vanished peers, and tcp with keys."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from harness.serving import wait_until
from unison.ipc.address import Address
from unison.ipc.channel import ChannelConfig, Delivery, Dialer, Listener
from unison.ipc.errors import CapacityError, ConfigError
from unison.ipc.messages import CODEC, Failed, Ping, Pong, SubmitRequest
from unison.ipc.types import GenerateRequest, SamplingParams

REQUEST = SubmitRequest(GenerateRequest("r", (1,), SamplingParams()), False)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    made = Listener(f"ipc://{tmp_path}/w.sock", ChannelConfig(send_queue_messages=2))
    yield made
    made.close()
    assert not (tmp_path / "w.sock").exists(), "the socket file goes with its listener"


def dial(listener: Listener, **options: Any) -> Dialer:
    return Dialer(Address(listener.endpoint, "e", 1, "t"), **options)


def test_control_and_requests_come_apart(listener: Listener) -> None:
    """Requests wait in a lane of their own, in order, while control messages are taken at once."""
    dialer = dial(listener)
    dialer.send(1, REQUEST)
    dialer.send(2, Ping())
    dialer.send(3, REQUEST)
    control, requests = [], []
    while len(control) + len(requests) < 3:
        assert listener.socket.poll(10_000)
        control += listener.drain(10)
        requests += listener.take_requests()
    assert [CODEC.decode(item.frame) for item in control] == [(2, Ping())]
    assert [CODEC.decode(item.frame)[0] for item in requests] == [1, 3]
    assert listener.send(control[0].peer, 2, Pong()) is Delivery.QUEUED
    assert wait_until(dialer.drain, "the answer") == [(2, Pong())]
    dialer.close()


def test_the_socket_is_the_users_own(listener: Listener, tmp_path: Path) -> None:
    """P43: the file is closed to others, besides lying in a private directory."""
    assert stat.S_IMODE((tmp_path / "w.sock").stat().st_mode) & 0o077 == 0


def test_nobody_is_an_answer(listener: Listener) -> None:
    assert listener.send(b"nobody", 1, Pong()) is Delivery.GONE


def test_a_full_queue_is_an_answer_not_a_wait(listener: Listener) -> None:
    """Finite queues in both directions: the sender is told, and goes on."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.RCVHWM, 1)
        raw.connect(listener.endpoint)
        raw.send_multipart((b"c", CODEC.encode(1, Ping())))
        (hello,) = wait_until(lambda: listener.drain(10), "a message")
        large = Failed("x", "y" * 50_000, {})
        outcomes = [listener.send(hello.peer, 1, large) for _ in range(400)]
        assert outcomes[0] is Delivery.QUEUED and Delivery.FULL in outcomes

    dialer = dial(listener, config=ChannelConfig(receive_queue_messages=2))
    with pytest.raises(CapacityError, match="it doesn't read"):
        for _ in range(100_000):
            dialer.send(1, REQUEST)
    dialer.close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "inproc://x", "ipc://relative", "udp://127.0.0.1:1", ""])
def test_endpoints_that_are_not_offered(endpoint: str) -> None:
    """P43: tcp needs keys; other schemes aren't offered, on either side."""
    with pytest.raises(ConfigError, match="endpoint"):
        Listener(endpoint)
    with pytest.raises(ConfigError, match="endpoint"):
        Dialer(Address(endpoint, "e", 1, "t"))


def test_tcp_with_keys() -> None:
    """P43: CURVE on tcp: with the server's key messages pass, without it or with another nothing does."""
    public, secret = zmq.curve_keypair()
    listener = Listener("tcp://127.0.0.1:0", curve=(public, secret))
    assert not listener.endpoint.endswith(":0")
    good = Dialer(Address(listener.endpoint, "e", 1, "t", public.decode()))
    good.send(5, Ping())
    (received,) = wait_until(lambda: listener.drain(10), "the message")
    assert CODEC.decode(received.frame) == (5, Ping())
    listener.send(received.peer, 5, Pong())
    assert wait_until(good.drain, "the answer") == [(5, Pong())]

    wrong_key, _ = zmq.curve_keypair()
    wrong = Dialer(Address(listener.endpoint, "e", 1, "t", wrong_key.decode()), ChannelConfig(linger_ms=0))
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(listener.endpoint)
        plain.send_multipart((b"c", CODEC.encode(6, Ping())))
        wrong.send(6, Ping())
        good.send(7, Ping())
        seen = wait_until(lambda: listener.drain(10), "the message with the right key")
        assert [CODEC.decode(item.frame)[0] for item in seen] == [7]
    for dialer in (good, wrong):
        dialer.close()
    listener.close()
