"""Supervisor: parent of a run's processes: starts them in order, watches, restarts or stops them, and cleans up.

Order: run directory, janitor, listening socket, worker, probe token, server. A worker that dies is started again on
the arena's live version, which it attests before it takes traffic (P10). The supervisor holds the arena's memfd and the
listening socket, so that neither weights nor port go with a child. It serves descriptors to publishers of the same
user.

Owns: processes, run directory, sockets (P1). Knows nothing of tokens or tensors. Called by bin/serve.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from time import monotonic, time
from typing import Any

from ..ipc.address import FD_SOCKET, make_private_dir, new_token, socket_path
from ..ipc.client import Client, ClientConfig
from ..ipc.errors import ConfigError, ProcessFailedError, UnisonError
from ..ipc.memory import FdServer
from ..ipc.types import SamplingParams
from .config import ServeConfig
from .janitor import remove_volatile
from .process import Child, Report
from .service import Service, Verdict

log = logging.getLogger(__name__)

WATCH_S = 0.25
"""How often children are looked at where nothing announces a change."""
STATE_FILE = "supervisor.json"
PROBE, PROBE_S = (0,), 30.0
"""Prompt of the probe, and how long a new worker may take to answer it."""


class Supervisor:
    """Life: built → `run` until told to stop or a process fails for good → everything is gone. One thread."""

    def __init__(self, config: ServeConfig, on_ready: Callable[[dict[str, Any]], None]) -> None:
        """`on_ready` gets the run's description when the first probe token has come back.

        Raises:
            ConfigError: the run directory is in use or can't be used, or the address can't be listened on.
        """
        self._config = config
        self._on_ready = on_ready
        self.run_dir = make_private_dir(Path(config.run_dir).absolute() if config.run_dir else default_run_dir())
        self._lock = _lock(self.run_dir)
        self._listening: socket.socket | None = None
        self._arena_fd = -1
        self._arena_description = b""
        self._token = new_token()
        self._signals: list[int] = []
        self._was_ready = False
        try:
            remove_volatile(self.run_dir)
            if config.network.is_enabled:
                self._listening = _listen(config)
            self._fds = FdServer(socket_path(self.run_dir, FD_SOCKET), self._offer)
        except BaseException:
            self._lock.close()
            if self._listening is not None:
                self._listening.close()
            raise
        self._janitor = self._start_janitor()
        self._worker = Service("worker", config.supervisor, self._spawn_worker)
        self._server = Service("server", config.supervisor, self._spawn_server)
        self._services = [self._worker, self._server]
        """In the order of their start; they are stopped in the opposite one."""
        self._write_state("starting")

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises:
            ProcessFailedError: a process failed for good; everything is stopped by then.
        """
        wake, wakened = socket.socketpair()
        for end in (wake, wakened):
            end.setblocking(False)
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        signal.set_wakeup_fd(wakened.fileno(), warn_on_full_buffer=False)
        try:
            self._worker.start()
            while not self._is_over():
                self._turn(wake)
            log.info("stopping", extra={"signals": [signal.Signals(number).name for number in self._signals]})
        finally:
            self._stop()
            signal.set_wakeup_fd(-1)
            for number, handler in previous.items():
                signal.signal(number, handler)
            wake.close()
            wakened.close()

    def _turn(self, wake: socket.socket) -> None:
        self._sleep(wake)
        self._fds.serve_one()
        self._tend_janitor()
        for service in self._services:
            self._tend(service)
        self._start_due()
        is_ready = self._worker.is_ready and (self._server.is_ready or not self._config.network.is_enabled)
        if is_ready and not self._was_ready:
            self._was_ready = True
            self._on_ready(self._write_state("ready"))

    def _is_over(self) -> bool:
        """Whether the run ends now."""
        return bool(self._signals)

    def _start_due(self) -> None:
        """Start for the first time what waits for another service."""
        if self._config.network.is_enabled and self._worker.is_ready and self._server.num_starts == 0:
            self._server.start()

    def _sleep(self, wake: socket.socket) -> None:
        """Until something happens, at most `WATCH_S`."""
        poller = select.poll()
        children = [service.child for service in self._services if service.child is not None]
        sources = [wake.fileno(), self._fds.fileno()]
        sources += [fd for child in children for fd in (child.control.fileno(), child.pidfd)]
        for source in sources:
            poller.register(source, select.POLLIN)
        poller.poll(WATCH_S * 1000)
        try:
            wake.recv(4096)
        except BlockingIOError:
            pass

    def _tend(self, service: Service) -> None:
        """Hear a service's reports, examine it, start it again where that is due."""
        for report in service.take_reports():
            self._hear(service, report)
        verdict, story = service.examine(monotonic())
        if verdict is Verdict.GIVE_UP:
            with suppress(OSError):  # the disk may be what has failed
                self._write_state("failed")
            raise ProcessFailedError(story)
        if verdict is Verdict.RESTART:
            log.error("process restarted", extra={"service": service.name, "story": story})
            service.start()

    def _hear(self, service: Service, report: Report) -> None:
        """Act on one report of a child."""
        if report.kind == "ready" and service is self._worker:
            self._keep_arena(report.fds, report.values.pop("arena"))
            self._probe()
            log.info("worker ready", extra=report.values)

    def _keep_arena(self, fds: tuple[int, ...], description: str) -> None:
        """The newest worker's arena is the run's: the same memory on CPU, a new header in front of a GPU's."""
        (fd,) = fds
        if self._arena_fd >= 0:
            os.close(self._arena_fd)
        self._arena_fd, self._arena_description = fd, bytes.fromhex(description)

    def _probe(self) -> None:
        """Ready is only what has answered: one token through the channel. A failed probe kills the worker."""
        child = self._worker.child
        assert child is not None
        until_s = monotonic() + PROBE_S
        settings = ClientConfig(connect_s=1.0)
        while child.is_running():
            try:
                with Client.connect(self.run_dir, role="supervisor", config=settings) as client:
                    client.generate(PROBE, SamplingParams(max_tokens=1, temperature=0), deadline_s=PROBE_S)
                return
            except UnisonError as error:
                if monotonic() > until_s:
                    log.error("the probe failed", extra={"reason": str(error)})
                    child.kill()
                    break
        self._worker.is_ready = False

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:  # asked twice: don't drain
            for service in self._services:
                if service.child is not None:
                    service.child.kill()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Server first, so that what it has accepted is finished; then the worker; then what lies around."""
        drain_s = self._config.supervisor.drain_s
        until_s = monotonic() + drain_s
        for service in reversed(self._services):
            how = service.stop(max(0.0, until_s - monotonic()) + 5.0)
            log.info("process stopped", extra={"service": service.name, "how": how})
        self._fds.close()
        if self._listening is not None:
            self._listening.close()
        if self._arena_fd >= 0:
            os.close(self._arena_fd)
        remove_volatile(self.run_dir)
        self._tell_janitor("done")
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        self._janitor.wait()
        self._lock.close()

    # ---- children ----------------------------------------------------------------------------------------------------

    def _spawn(self, name: str, module: str, fds: dict[str, int], **extra: Any) -> Child:
        message = {"name": name, "log_level": self._config.log_level, **extra}
        child = Child.spawn(name, module, message, fds, self.run_dir / f"{name}.log")
        self._tell_janitor(f"+{child.pid}")
        return child

    def _spawn_worker(self) -> Child:
        fds = {"arena": self._arena_fd} if self._arena_fd >= 0 else {}
        return self._spawn("worker", "unison.workers.gpu", fds, serve=self._serve_config(), token=self._token)

    def _spawn_server(self) -> Child:
        assert self._listening is not None
        fds = {"listen": self._listening.fileno()}
        return self._spawn("server", "unison.workers.network", fds, serve=self._serve_config())

    def _serve_config(self) -> dict[str, Any]:
        return self._config.to_dict() | {"run_dir": str(self.run_dir)}

    def _start_janitor(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "unison.workers.janitor", str(self.run_dir)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def _tend_janitor(self) -> None:
        if self._janitor.poll() is None:
            return
        log.warning("janitor restarted", extra={"code": self._janitor.returncode})
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        self._janitor = self._start_janitor()
        for service in self._services:
            if service.child is not None:
                self._tell_janitor(f"+{service.child.pid}")

    def _tell_janitor(self, line: str) -> None:
        assert self._janitor.stdin is not None
        try:
            self._janitor.stdin.write(f"{line}\n".encode())
            self._janitor.stdin.flush()
        except BrokenPipeError:  # it is gone; the next turn starts another, which is told everything
            pass

    def _offer(self, name: str) -> tuple[bytes, tuple[int, ...]] | None:
        has_arena = name == "arena" and self._arena_fd >= 0
        return (self._arena_description, (self._arena_fd,)) if has_arena else None

    def _write_state(self, state: str) -> dict[str, Any]:
        """The run's description, for `bin/serve status` and for people."""
        url = ""
        if self._listening is not None:
            host, port = self._listening.getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        description = {
            "state": state, "pid": os.getpid(), "run_dir": str(self.run_dir), "model": self._config.name, "url": url,
            "since": time(),
        }  # fmt: skip
        partial = self.run_dir / f".{STATE_FILE}.{os.getpid()}"
        partial.write_text(json.dumps(description))
        os.replace(partial, self.run_dir / STATE_FILE)
        return description


def default_run_dir() -> Path:
    """A new directory of this user's, short enough for socket paths."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="unison-", dir=base))


def _lock(run_dir: Path) -> Any:
    """Hold the run directory; the lock goes with this process, whatever ends it."""
    file = (run_dir / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError("run_dir", f"is {run_dir}, where another run is active; stop it or choose another") from None
    return file


def _listen(config: ServeConfig) -> socket.socket:
    """The listening socket; it outlives the servers that accept from it."""
    network = config.network
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            network.host, network.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError("network.host", f"is {network.host!r}, which isn't an address here: {error}") from error
    has_key = network.api_key or os.environ.get("UNISON_API_KEY")
    if not ip_address(str(address[0]).partition("%")[0]).is_loopback and not has_key:
        raise ConfigError(
            "network.host", f"is {network.host!r}, beyond this machine; set an API key (--api-key or UNISON_API_KEY)"
        )
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise ConfigError(
            "network.port", f"is {network.port}: {error.strerror}; choose another, or 0 for a free one"
        ) from error
    return listening
