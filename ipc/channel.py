"""Listener and Dialer: typed messages over ZeroMQ, one ROUTER at the worker, one DEALER per client.

Delivery: in order per client and lane, at most once per send; what isn't delivered is lost with its connection, and
the caller learns it (a new epoch, a dead pid, a deadline), never silently. Nothing here blocks: a full queue is an
answer, not a wait. Two lanes: control messages (cancel, publish, pin, pause, status) overtake queued requests.

Owns: sockets, high-water marks, lanes, linger, CURVE on tcp. Knows nothing of what messages mean. Called by the worker
(Listener) and by the client library (Dialer). Source: ZeroMQ RFC 28/REQREP (ROUTER, DEALER), RFC 26/CURVEZMQ.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import zmq

from .address import Address
from .errors import CapacityError, ConfigError, HandshakeError
from .messages import CODEC, SubmitRequest
from .wire import MAX_FRAME_BYTES

CONTROL, REQUEST = b"c", b"r"
"""Lanes: first frame of every message to the worker."""


@dataclass(frozen=True)
class ChannelConfig:
    """Bounds of a channel."""

    send_queue_messages: int = 1000
    """Messages that may wait for one peer before it counts as slow."""
    receive_queue_messages: int = 10_000
    """Messages that may wait to be read, per peer."""
    linger_ms: int = 1000
    """How long a closed socket goes on sending what was queued."""


@dataclass(frozen=True)
class Received:
    """One message as it came, not decoded yet."""

    peer: bytes
    """Routing id of the sender."""
    frame: bytes
    """What the codec decodes; empty where the parts on the wire weren't two."""


class Delivery(Enum):
    """What became of a send."""

    QUEUED = "queued"
    """On its way."""
    FULL = "full"
    """The peer's queue is at its mark; nothing was sent."""
    GONE = "gone"
    """No such peer is connected."""


class Listener:
    """The worker's end. Life: bound → drained and sent through by one thread → closed (its socket file goes too)."""

    def __init__(self, endpoint: str, config: ChannelConfig | None = None, curve: tuple[bytes, bytes] | None = None):
        """Bind. `curve` is (public, secret) in Z85 and required on tcp; port 0 takes a free one.

        Raises:
            ConfigError: tcp without CURVE, a scheme that isn't offered, or an address that can't be bound.
        """
        config = config or ChannelConfig()
        self._path = _checked_endpoint(endpoint, curve is not None)
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        options = {
            zmq.ROUTER_MANDATORY: 1, zmq.SNDHWM: config.send_queue_messages, zmq.RCVHWM: config.receive_queue_messages,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES, zmq.LINGER: config.linger_ms,
        }  # fmt: skip
        for option, value in options.items():
            self.socket.setsockopt(option, value)
        if curve is not None:
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, curve[0])
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, curve[1])
        try:
            # The file is made with the mode that the umask leaves; the directory is 0700 besides.
            previous = os.umask(0o177)
            try:
                self.socket.bind(endpoint)
            finally:
                os.umask(previous)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError("endpoint", f"is {endpoint}, which can't be bound: {error}") from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._requests: list[Received] = []

    def drain(self, limit: int) -> list[Received]:
        """Take in what has come, at most `limit` messages; returns those of the control lane, in order."""
        control: list[Received] = []
        for _ in range(limit):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            received = Received(parts[0], parts[2] if len(parts) == 3 and parts[1] in (CONTROL, REQUEST) else b"")
            (self._requests if received.frame and parts[1] == REQUEST else control).append(received)
        return control

    def take_requests(self) -> list[Received]:
        """What has come on the request lane since the last call."""
        requests, self._requests = self._requests, []
        return requests

    def send(self, peer: bytes, call_id: int, message: Any) -> Delivery:
        """Queue one message for one peer, without waiting."""
        return self.send_frame(peer, CODEC.encode(call_id, message))

    def send_frame(self, peer: bytes, frame: bytes) -> Delivery:
        """The same for a message that is encoded already."""
        try:
            self.socket.send_multipart((peer, frame), zmq.NOBLOCK, copy=len(frame) < 65_536)
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Delivery.GONE
            raise
        return Delivery.QUEUED

    def close(self) -> None:
        """Send what is queued for at most the linger time, and remove the socket file."""
        self.socket.close()
        self._context.term()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class Dialer:
    """A client's end, for one thread. Life: connected → used → closed; a new worker needs a new dialer.

    `fileno` becomes readable when something has changed (edge-triggered, as ZMQ_FD is): drain after it, and after each
    send too, since a send may take the edge away.
    """

    def __init__(self, address: Address, config: ChannelConfig | None = None) -> None:
        """Connect (the transport goes on trying in the background).

        Raises:
            ConfigError, HandshakeError: the address is none that may be used.
        """
        config = config or ChannelConfig()
        path = _checked_endpoint(address.endpoint, bool(address.curve_public_key))
        if path is not None and path.exists() and path.stat().st_uid != os.geteuid():
            raise HandshakeError(f"{path} belongs to user {path.stat().st_uid}, this process runs as {os.geteuid()}")
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        options = {
            zmq.SNDHWM: config.receive_queue_messages, zmq.RCVHWM: config.send_queue_messages,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES, zmq.LINGER: config.linger_ms,
            zmq.RECONNECT_IVL: 20, zmq.RECONNECT_IVL_MAX: 500,
        }  # fmt: skip
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        if address.curve_public_key:
            public, secret = zmq.curve_keypair()
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, address.curve_public_key.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.connect(address.endpoint)

    def fileno(self) -> int:
        """For an event loop."""
        return int(self._socket.getsockopt(zmq.FD))

    def send(self, call_id: int, message: Any) -> None:
        """Queue one message.

        Raises:
            CapacityError: the queue to the worker is full: it doesn't read. WireError: it can't be encoded.
        """
        lane = REQUEST if type(message) is SubmitRequest else CONTROL
        try:
            self._socket.send_multipart((lane, CODEC.encode(call_id, message)), zmq.NOBLOCK)
        except zmq.Again:
            raise CapacityError("the queue to the worker is full: it doesn't read; try again later") from None

    def drain(self) -> list[tuple[int, Any]]:
        """Every (call id, message) that has come.

        Raises:
            WireError: a frame isn't of this protocol.
        """
        messages: list[tuple[int, Any]] = []
        while True:
            try:
                messages.append(CODEC.decode(self._socket.recv_multipart(zmq.NOBLOCK)[-1]))
            except zmq.Again:
                return messages

    def close(self) -> None:
        """Send what is queued for at most the linger time."""
        self._socket.close()
        self._context.term()


def _checked_endpoint(endpoint: str, has_curve: bool) -> Path | None:
    """The socket's path on `ipc://`, None on `tcp://`; raises ConfigError for what isn't offered."""
    if endpoint.startswith("ipc:///"):
        return Path(endpoint.removeprefix("ipc://"))
    if endpoint.startswith("tcp://"):
        if not has_curve:
            raise ConfigError("endpoint", f"is {endpoint}: tcp is offered with CURVE keys only; or use ipc://")
        return None
    raise ConfigError("endpoint", f"is {endpoint!r}; offered are ipc:///ABSOLUTE/PATH and tcp://HOST:PORT")
