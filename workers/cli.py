"""The command lines of bin/serve: options to configuration, configuration to a supervisor, a run to a live table.

Owns: parsing and printing. Errors of ours are printed as one line with exit code 78 (configuration) or 70 (fault).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from ..ipc.errors import ConfigError, UnisonError
from .config import ServeConfig, put, read_settings
from .logs import setup_logging
from .process import EXIT_CONFIG, EXIT_FAULT

OPTIONS = {
    "model": "model", "served_name": "served_name", "run_dir": "run_dir", "host": "network.host",
    "port": "network.port", "api_key": "network.api_key", "admin_key": "network.admin_key", "device": "engine.device",
    "dtype": "engine.dtype", "max_model_len": "engine.max_model_len", "drain_s": "supervisor.drain_s",
    "num_buffers": "worker.num_buffers", "log_level": "log_level",
}  # fmt: skip
"""Named option → dotted name of the setting that it is short for."""
SECRETS = ("api_key", "admin_key")


@click.group("serve", invoke_without_command=True, context_settings={"show_default": True})
@click.option("--model", help="Hugging Face directory (bin/fetch-model makes one).")
@click.option("--served-name", help="Name under which the model is served; the directory's name by default.")
@click.option("--host", help="Address to listen on; 127.0.0.1 by default. Beyond loopback an API key is required.")
@click.option("--port", type=int, help="Port to listen on; 8000 by default, 0 takes a free one.")
@click.option("--run-dir", help="Directory of this run: sockets, logs, address file.")
@click.option("--device", help="cpu, cuda or cuda:N; cpu by default.")
@click.option("--dtype", help="bfloat16 (default) or float32.")
@click.option("--max-model-len", type=int, help="Most tokens of one sequence; the model's context by default.")
@click.option("--num-buffers", type=int, help="Weight buffers: 2 (default) or 3.")
@click.option("--api-key", help="Key that clients must show; better in the environment as UNISON_API_KEY.")
@click.option("--admin-key", help="Key for changes under /v1/policy; better in the environment as UNISON_ADMIN_KEY.")
@click.option("--drain-s", type=float, help="At SIGTERM, seconds that requests in flight may go on; 30 by default.")
@click.option("--log-level", help="debug, info (default), warning or error.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file with settings.")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="One setting; may be repeated.")
@click.option("--no-http", is_flag=True, help="No HTTP server: clients speak to the worker only.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and the memory plan, and stop.")
@click.pass_context
def serve(
    context: click.Context, config_file: Path | None, assignments: tuple[str, ...], no_http: bool, dry_run: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Serve a model: one GPU worker (CPU where there is none), ZeroMQ and HTTP. `serve status RUN_DIR` shows a run."""
    if context.invoked_subcommand is not None:
        return
    values = read_settings(config_file, assignments)
    for option, value in options.items():
        if value is not None:
            put(values, OPTIONS[option], value)
    if no_http:
        put(values, "network.is_enabled", False)
    config = ServeConfig.from_dict(values)
    if not config.model or not (Path(config.model) / "config.json").is_file():
        raise ConfigError("model", f"is {config.model!r}; give a Hugging Face directory (bin/fetch-model makes one)")
    config = ServeConfig.from_dict(config.to_dict() | {"model": str(Path(config.model).absolute())})
    if dry_run:
        print_plan(config)
        return
    from .supervisor import Supervisor

    setup_logging("supervisor", config.log_level)
    Supervisor(config, print_ready).run()


def print_ready(run: dict[str, Any]) -> None:
    """One line for people and scripts."""
    click.echo(f"ready: {run['url'] or 'no HTTP'} model={run['model']} run_dir={run['run_dir']}")
    sys.stdout.flush()


def print_plan(config: ServeConfig) -> None:
    """The resolved configuration as JSON, secrets left out, and what memory it takes."""
    from .plan import MemoryPlan

    values = without_secrets(config.to_dict())
    plan = MemoryPlan.of(config)
    click.echo(json.dumps({"configuration": values, "memory": vars(plan)}, indent=2))


def without_secrets(values: dict[str, Any]) -> dict[str, Any]:
    """A ServeConfig's values with every key that is set replaced by a word."""
    shown = {name: "(set)" for name in SECRETS if values["network"][name]}
    return values | {"network": values["network"] | shown}


@serve.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print once and stop.")
@click.option("--interval-s", default=1.0, help="Seconds between two readings.")
def status(run_dir: Path, once: bool, interval_s: float) -> None:
    """A live table of a run; printed once where the output is no terminal."""
    from .status_table import show

    show(run_dir, once or not sys.stdout.isatty(), interval_s)


@serve.command()
@click.option("--model", type=click.Path(path_type=Path), help="Also try this Hugging Face directory.")
@click.option("--json", "as_json", is_flag=True, help="JSON for scripts.")
@click.option("--deadline-s", default=10.0, help="Longest self-test.")
def doctor(model: Path | None, as_json: bool, deadline_s: float) -> None:
    """What this machine has of what Unison needs, and a short self-test. Exit code 1 where a check has failed."""
    from .doctor import show

    sys.exit(show(model, as_json, deadline_s))


def run_command(command: click.Command, name: str) -> None:
    """Run a command line to its end: exit code 78 for a configuration that can't be, 70 for a fault."""
    try:
        command.main(standalone_mode=False, prog_name=name)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_CONFIG)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except UnisonError as error:
        click.echo(f"{command.name}: {error}", err=True)
        sys.exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAULT)


def main() -> None:
    """Run bin/serve's command line."""
    run_command(serve, os.environ.get("UNISON_PROG", "serve"))


if __name__ == "__main__":
    main()
