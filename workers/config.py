"""ServeConfig and its parts: every constant of the processes, with unit, bound and default.

Owns: the knobs of worker, supervisor and HTTP server around the engine's own. One way in: a TOML file, then `--set`,
then named options of the command line, each over the one before. Frozen after start. docs/configuration.md is compared
with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib

from ..engine.config import EngineConfig
from ..engine.settings import Checked, bounded, from_dict, to_dict
from ..ipc.errors import ConfigError


@dataclass(frozen=True)
class WorkerConfig(Checked):
    """The GPU worker's channel, queue and arena."""

    num_buffers: int = bounded(2, 2, 3)
    """Weight buffers of the arena: the live version, the next one, and perhaps one more that is pinned."""
    first_ordinal: int = bounded(0, 0, 2**62)
    """Policy version that the directory's weights are; above 0 where a run goes on from a checkpoint."""
    endpoint: str = bounded("")
    """`tcp://HOST:PORT` to listen beyond this machine (with CURVE); empty: a socket in the run directory."""
    max_queued_requests: int = bounded(10_000, 1, 1_000_000)
    """Requests received and not yet admitted; one more is refused with `no_capacity`."""
    admit_per_turn: int = bounded(64, 1, 100_000)
    """Requests taken into the scheduler between two steps."""
    send_queue_messages: int = bounded(1000, 1, 1_000_000)
    """Messages that may wait for one client before it counts as slow and its requests are aborted."""
    client_silence_s: float = bounded(60.0, 1.0, 86_400.0)
    """A client that says nothing for so long is lost, and its requests are aborted; death is seen at once."""


@dataclass(frozen=True)
class SupervisorConfig(Checked):
    """Start, watch, restart, stop."""

    start_s: float = bounded(300.0, 1.0, 86_400.0)
    """Longest start of a process until it reports ready."""
    hang_s: float = bounded(60.0, 1.0, 86_400.0)
    """A process that gives no sign of life for so long is killed and restarted; longer than the longest step."""
    stopped_s: float = bounded(2.0, 0.1, 86_400.0)
    """A process that a signal has stopped for so long is killed and restarted."""
    max_restarts: int = bounded(5, 0, 1000)
    """Restarts of one process within `restart_window_s`; one more ends the run with the process's story."""
    restart_window_s: float = bounded(300.0, 1.0, 86_400.0)
    """See `max_restarts`."""
    drain_s: float = bounded(30.0, 0.0, 86_400.0)
    """At SIGTERM, how long requests in flight may go on."""


@dataclass(frozen=True)
class NetworkConfig(Checked):
    """The HTTP server."""

    is_enabled: bool = bounded(True)
    """False runs the worker alone, for clients on ZeroMQ."""
    host: str = bounded("127.0.0.1")
    """Address to listen on; loopback unless told otherwise."""
    port: int = bounded(8000, 0, 65535)
    """Port to listen on; 0 takes a free one, which `ready` names."""
    api_key: str | None = bounded(None)
    """Clients must show it; UNISON_API_KEY in the environment does the same without appearing in process lists."""
    admin_key: str | None = bounded(None)
    """Needed for changes under /v1/policy, which are refused without one; also UNISON_ADMIN_KEY."""
    max_concurrent: int = bounded(256, 1, 100_000)
    """HTTP requests that generate at once; one more gets 429 with Retry-After."""
    max_body_bytes: int = bounded(8 << 20, 1024, 1 << 30)
    """Longest request body."""
    request_timeout_s: float = bounded(600.0, 0.1, 86_400.0)
    """Longest generation; then 408."""
    progress_age_s: float = bounded(30.0, 1.0, 3600.0)
    """/health is true only if a step or probe has made progress within it."""


@dataclass(frozen=True)
class ServeConfig(Checked):
    """All of bin/serve's configuration."""

    model: str = bounded("")
    """Hugging Face directory of the model."""
    served_name: str = bounded("")
    """Name under which it is served; empty takes the directory's name."""
    run_dir: str = bounded("")
    """Directory of this run, mode 0700; empty makes one under $XDG_RUNTIME_DIR or the temporary directory."""
    log_level: str = bounded("info", choices=("debug", "info", "warning", "error"))
    """Least level that is logged."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The engine's own configuration."""
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    """The GPU worker."""
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    """Start, watch, restart, stop."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The HTTP server."""

    @property
    def name(self) -> str:
        """The name under which the model is served."""
        return self.served_name or Path(self.model).absolute().name

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ServeConfig:
        """Build from nested mappings.

        Raises:
            ConfigError: an unknown key or a value out of bounds, with its dotted name (P4).
        """
        config: ServeConfig = from_dict(ServeConfig, values, "")
        return config

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values; `from_dict` gives an equal configuration back."""
        return to_dict(self)


def read_settings(file: Path | None, assignments: Iterable[str]) -> dict[str, Any]:
    """Nested values from a TOML file and from `section.key=value` assignments over it.

    Raises:
        ConfigError: the file can't be read, or an assignment isn't one.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("config", f"{file} can't be read as TOML: {error}") from error
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise ConfigError("set", f"{assignment!r} isn't of the form section.key=value")
        put(values, name.strip(), parse_value(text.strip()))
    return values


def put(values: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted name in nested mappings."""
    *sections, key = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(name, f"{section} is a value, not a section")
    values[key] = value


def parse_value(text: str) -> Any:
    """A TOML or JSON scalar where it is one (`true`, `12`, `0.5`, `"x"`, `none`), else the text itself."""
    if text.lower() in ("none", "null"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
