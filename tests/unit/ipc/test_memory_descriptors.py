"""Descriptors that travel between processes: sent, fetched by name, refused."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from unison.ipc import memory
from unison.ipc.errors import ConfigError, DeadlineError, HandshakeError, WireError
from unison.ipc.memory import (
    MAX_FDS,
    MAX_NAME_BYTES,
    MAX_PAYLOAD_BYTES,
    FdServer,
    SharedMemory,
    fetch_fds,
    peer_uid,
    recv_fds,
    send_fds,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=[socket.SOCK_SEQPACKET, socket.SOCK_STREAM], ids=["seqpacket", "stream"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    one, other = socket.socketpair(socket.AF_UNIX, request.param)
    with one, other:
        yield one, other


@pytest.fixture
def private(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


# ---- descriptors over sockets ----------------------------------------------------------------------------------------


def test_descriptors_travel(pair: Pair) -> None:
    with SharedMemory.create("sent", 4096) as made:
        send_fds(pair[0], b"hello", [made.fd, made.fd])
        payload, fds = recv_fds(pair[1], 100, 4, 10)
        assert payload == b"hello" and len(fds) == 2 and made.fd not in fds
        assert [os.path.sameopenfile(fd, made.fd) for fd in fds] == [True, True]
        assert not any(os.get_inheritable(fd) for fd in fds)
        for fd in fds:
            SharedMemory.attach(fd, 4096).close()


def test_bytes_alone_and_the_end(pair: Pair) -> None:
    send_fds(pair[0], b"alone", [])
    assert recv_fds(pair[1], 100, 4, 10) == (b"alone", ())
    pair[0].close()
    assert recv_fds(pair[1], 100, 4, 10) == (b"", ())


@pytest.mark.parametrize("deadline_s", [-1.0, 0.0, 0.05])
def test_nothing_comes(pair: Pair, deadline_s: float) -> None:
    """P2."""
    with pytest.raises(DeadlineError, match=f"no descriptors came within {deadline_s} s"):
        recv_fds(pair[1], 100, 4, deadline_s)


@pytest.mark.parametrize("max_fds", [0, 1, 2])
def test_more_descriptors_than_allowed_are_closed(pair: Pair, max_fds: int) -> None:
    """What was cut off is an error, and nothing of it stays open (the leak check looks)."""
    with SharedMemory.create("sent", 4096) as made:
        send_fds(pair[0], b"hello", [made.fd] * 3)
        with pytest.raises(WireError, match=f"100 bytes or {max_fds} descriptors"):
            recv_fds(pair[1], 100, max_fds, 10)


def test_a_payload_that_is_cut_off() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other, SharedMemory.create("sent", 4096) as made:
        send_fds(one, bytes(200), [made.fd])
        with pytest.raises(WireError, match="more than 100 bytes"):
            recv_fds(other, 100, 4, 10)


def test_a_payload_that_the_socket_does_not_take_whole() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        one.setblocking(False)
        with pytest.raises(WireError, match=f"of {8 << 20} bytes"):
            send_fds(one, bytes(8 << 20), [])


def test_the_kernel_says_who_is_there(pair: Pair) -> None:
    assert peer_uid(pair[0]) == peer_uid(pair[1]) == os.geteuid()


# ---- the server ------------------------------------------------------------------------------------------------------


class Serving:
    """An FdServer in a thread, for as long as the block lasts."""

    def __init__(self, path: Path, offers: dict[str, tuple[bytes, list[int]]]) -> None:
        self.server = FdServer(path, offers.get)
        self._end, self._other_end = os.pipe()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        while self._end not in select.select([self.server, self._end], [], [])[0]:
            self.server.serve_one()

    def __enter__(self) -> FdServer:
        self._thread.start()
        return self.server

    def __exit__(self, *_: object) -> None:
        os.close(self._other_end)
        self._thread.join()
        os.close(self._end)
        self.server.close()


def test_what_is_offered_can_be_fetched(private: Path) -> None:
    """Also by a process that knows nothing but the path."""
    path = private / "fds.sock"
    with SharedMemory.create("offered", 4096) as made, made.map(writable=True) as pages:
        pages[:5] = b"bytes"
        offers = {"arena": (b"description", [made.fd]), "nothing": (b"", []), "many": (b"", [made.fd] * MAX_FDS)}
        with Serving(path, offers):
            assert path.is_socket() and path.stat().st_mode & 0o777 == 0o600
            payload, (fd,) = fetch_fds(path, "arena", 30)
            with SharedMemory.attach(fd, 4096) as taken, taken.map(writable=False) as theirs:
                assert payload == b"description" and theirs[:5] == b"bytes"
            assert fetch_fds(path, "nothing", 30) == (b"", ())
            fds = fetch_fds(path, "many", 30)[1]
            assert len(fds) == MAX_FDS
            for fd in fds:
                os.close(fd)
            code = ("import json, os, sys; from pathlib import Path; from unison.ipc.memory import fetch_fds;"
                    "payload, (fd,) = fetch_fds(Path(sys.argv[1]), 'arena', 30);"
                    "print(json.dumps([payload.decode(), os.pread(fd, 5, 0).decode()]))")  # fmt: skip
            ended = subprocess.run(
                [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60, check=True
            )
            assert json.loads(ended.stdout) == ["description", "bytes"]
    assert not path.exists()


@pytest.mark.parametrize("name", ["other", "", "x" * MAX_NAME_BYTES, "x" * (MAX_NAME_BYTES + 1), "naïve"])
def test_other_names_are_refused(private: Path, name: str) -> None:
    path = private / "fds.sock"
    reason = "the connection was closed|nothing is offered" if not name else "nothing is offered under the name"
    with Serving(path, {"x" * (MAX_NAME_BYTES + 1): (b"", [])}), pytest.raises(HandshakeError, match=reason):
        fetch_fds(path, name, 30)


def test_another_user_is_refused(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides look at the user that the kernel names."""
    path = private / "fds.sock"
    with closing(FdServer(path, {"a": (b"", [])}.get)) as server:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(path))
            client.send(b"a")
            monkeypatch.setattr(memory, "peer_uid", lambda sock: os.geteuid() + 1)
            server.serve_one()
            with pytest.raises(ConnectionResetError):
                client.recv(100)
        with pytest.raises(HandshakeError, match=f"served by user {os.geteuid() + 1}"):
            fetch_fds(path, "a", 30)
        server.serve_one()


def test_a_client_that_says_nothing_is_dropped(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: the poll loop of the server is held up for a bounded time, whatever a client does, and serves the next."""
    monkeypatch.setattr(memory, "_SERVE_S", 0.05)
    path = private / "fds.sock"
    with closing(FdServer(path, {"a": (b"yes", [])}.get)) as server:
        server.serve_one()  # nobody is there: it returns at once
        clients = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(4)]
        for client in clients:
            client.connect(str(path))
        silent, gone, deaf, good = clients
        gone.close()
        deaf.send(b"a")
        deaf.close()
        good.send(b"a")
        started = time.monotonic()
        for _ in clients:
            server.serve_one()
        assert time.monotonic() - started < 5
        assert (silent.recv(9), good.recv(9)) == (b"", b"\x00yes")
        silent.close()
        good.close()


def test_a_server_that_says_nothing(private: Path) -> None:
    """P2: neither a stopped server nor a full backlog holds a client beyond its deadline."""
    path = private / "fds.sock"
    with closing(FdServer(path, {"a": (b"", [])}.get)):
        with pytest.raises(DeadlineError, match="gave no answer for 'a' within 0.05 s"):
            fetch_fds(path, "a", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as full, \
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:  # fmt: skip
        full.bind(str(path))
        full.listen(0)
        waiting.connect(str(path))
        with pytest.raises(DeadlineError, match="within 0.05 s"):
            fetch_fds(path, "a", 0.05)


def test_nobody_serves(private: Path) -> None:
    with pytest.raises(HandshakeError, match="can't be asked for 'a': No such file"):
        fetch_fds(private / "fds.sock", "a", 1)
    pid = os.fork()
    if pid == 0:
        FdServer(private / "fds.sock", {}.get)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(HandshakeError, match="Connection refused"):
        fetch_fds(private / "fds.sock", "a", 1)
    FdServer(private / "fds.sock", {}.get).close()  # what the dead one left is no obstacle
    assert not (private / "fds.sock").exists()


def test_a_server_that_speaks_another_language(private: Path) -> None:
    path = private / "fds.sock"
    too_long = bytes(MAX_PAYLOAD_BYTES + 1)
    with SharedMemory.create("sent", 4096) as made:
        offers = {"long": (too_long, [made.fd]), "many": (b"", [made.fd] * (MAX_FDS + 1))}
        with Serving(path, offers):
            for name in offers:
                with pytest.raises(WireError, match="came at once"):
                    fetch_fds(path, name, 30)


def test_where_a_server_may_bind(private: Path) -> None:
    with pytest.raises(ConfigError, match="can't be bound: AF_UNIX path too long"):
        FdServer(private / ("x" * 108), {}.get)
    (private / "file").write_text("kept")
    with pytest.raises(ConfigError, match="Address already in use"):
        FdServer(private / "file", {}.get)
    assert (private / "file").read_text() == "kept"
    private.chmod(0o755)
    with pytest.raises(HandshakeError, match="only its owner may reach it"):
        FdServer(private / "fds.sock", {}.get)


def test_a_successor_keeps_its_socket(private: Path) -> None:
    first = FdServer(private / "fds.sock", {}.get)
    with closing(FdServer(private / "fds.sock", {}.get)):
        first.close()
        assert (private / "fds.sock").is_socket()
    first.close()
