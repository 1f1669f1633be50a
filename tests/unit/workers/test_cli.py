"""The command line: configuration from file, assignments and options, and errors that name the key."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness.tiny_directory import write_tiny_directory
from unison.ipc.errors import ConfigError
from unison.workers.config import ServeConfig, parse_value, put, read_settings


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unison.workers.cli", *arguments], capture_output=True, text=True, timeout=60,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "/nowhere"), "model: is '/nowhere'"),
        (("--model", ".", "--set", "engine.cache.nope=1"), "engine.cache.nope: is no known key"),
        (("--model", ".", "--set", "network.port=70000"), "network.port: is 70000; must be in [0, 65535]"),
        (("--model", ".", "--set", "network"), "isn't of the form section.key=value"),
        (("--model", ".", "--config", "/nowhere.toml"), "can't be read as TOML"),
        (("--nonsense",), "No such option"),
    ],
)
def test_bad_configurations_name_the_key(arguments: tuple[str, ...], says: str) -> None:
    """P4, P50: exit code 78 and one line that names the key, the value and the bound."""
    ended = serve(*arguments)
    assert ended.returncode == 78 and says in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_dry_run_prints_what_would_be(tmp_path: Path) -> None:
    """P50: the resolved configuration and the memory plan; later sources win; secrets aren't shown."""
    write_tiny_directory(tmp_path / "m")
    (tmp_path / "c.toml").write_text("[network]\nport = 1\nadmin_key = 'secret'\n[engine.cache]\nnum_tokens = 64\n")
    ended = serve(
        "--model", str(tmp_path / "m"), "--config", str(tmp_path / "c.toml"), "--set", "network.port=2", "--port", "3",
        "--dry-run",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    shown = json.loads(ended.stdout)
    assert shown["configuration"]["network"]["port"] == 3
    assert shown["configuration"]["network"]["admin_key"] == "(set)" and "secret" not in ended.stdout
    assert shown["memory"]["kv_tokens"] == 64
    assert shown["memory"]["arena_bytes"] == 2 * shown["memory"]["buffer_bytes"] > 0


def test_settings_survive_a_round_trip() -> None:
    config = ServeConfig.from_dict({"model": "m", "engine": {"dtype": "float32"}, "worker": {"num_buffers": 3}})
    assert ServeConfig.from_dict(config.to_dict()) == config
    assert ServeConfig(model="a/b/name").name == "name" and ServeConfig(model="m", served_name="s").name == "s"


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("0.5", 0.5), ("true", True), ("none", None), ('"1"', "1"), ("cuda:0", "cuda:0")]
)
def test_values_are_read_as_what_they_are(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_a_value_is_no_section() -> None:
    values = read_settings(None, ["model=x"])
    with pytest.raises(ConfigError, match="model is a value, not a section"):
        put(values, "model.y", 1)


@pytest.mark.slow
def test_the_url_of_a_run_that_is_not_there(tmp_path: Path) -> None:
    ended = serve("status", str(tmp_path), "--once")
    assert ended.returncode == 70 and "no worker in" in ended.stderr
