"""What a supervisor refuses before it starts anything."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from unison.ipc.errors import ConfigError, HandshakeError
from unison.workers.config import NetworkConfig, ServeConfig
from unison.workers.supervisor import Supervisor


def supervise(run_dir: Path, **network: object) -> None:
    Supervisor(ServeConfig(model="m", run_dir=str(run_dir), network=NetworkConfig(**network)), lambda _: None)  # type: ignore[arg-type]


def test_addresses_that_cannot_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P39, P43: a taken port, a host that isn't here, and listening beyond this machine without a key."""
    monkeypatch.delenv("UNISON_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match=r"network.port: is \d+: Address already in use"):
            supervise(tmp_path / "a", port=taken.getsockname()[1])
    with pytest.raises(ConfigError, match="network.host.*beyond this machine; set an API key"):
        supervise(tmp_path / "b", host="0.0.0.0", port=0)
    with pytest.raises(ConfigError, match="network.host"):
        supervise(tmp_path / "c", host="no.such.host.invalid", port=0)
    with pytest.raises(ConfigError, match="network.port"):
        supervise(tmp_path / "d", host="192.0.2.1", port=0, api_key="key")


def test_run_directories_that_cannot_be_used(tmp_path: Path) -> None:
    """P43, P39: a directory open to others, one that is a file, and one whose socket paths would be too long."""
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(HandshakeError, match="mode 755"):
        supervise(tmp_path / "open", is_enabled=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run_dir"):
        supervise(tmp_path / "file", is_enabled=False)
    with pytest.raises(ConfigError, match="system's limit is 107"):
        supervise(tmp_path / ("x" * 100), is_enabled=False)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".sock")]
