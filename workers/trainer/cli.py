"""The command lines of bin/train: options to configuration, configuration to a run, a run to tables and pictures.

Owns: parsing and printing. Errors of ours are printed as one line, with the exit codes of bin/serve.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ...ipc.errors import ConfigError
from ..cli import run_command
from ..config import put, read_settings
from ..logs import setup_logging
from ..process import EXIT_INTERRUPTED, Report
from ..rollout.tasks import absolute_source
from .config import CONFIG_FILE, TrainConfig

OPTIONS = {
    "model": "serve.model", "task": "task.source", "steps": "steps", "seed": "seed", "run_dir": "serve.run_dir",
    "algorithm": "algorithm.name", "mode": "rollout.mode", "group_size": "rollout.group_size",
    "groups_per_step": "rollout.groups_per_step", "max_tokens": "rollout.max_tokens",
    "temperature": "rollout.temperature", "learning_rate": "optimizer.learning_rate", "device": "serve.engine.device",
    "dtype": "serve.engine.dtype", "log_level": "serve.log_level",
}  # fmt: skip
"""Named option → dotted name of the setting that it is short for."""


@click.group("train", invoke_without_command=True, context_settings={"show_default": True})
@click.option("--model", help="Hugging Face directory (bin/fetch-model makes one).")
@click.option("--task", help="Built-in name, FILE.py:NAME, jsonl:PATH or reasoning_gym:NAME; sort-words by default.")
@click.option("--steps", type=int, help="Training steps in all; 100 by default.")
@click.option("--seed", type=int, help="Decides the order of prompts and every draw; 0 by default.")
@click.option("--run-dir", help="Directory of this run: checkpoints, ledger, metrics, logs, sockets.")
@click.option("--resume", is_flag=True, help="Go on with the run in --run-dir, with its own configuration.")
@click.option("--algorithm", help="grpo (default), dr_grpo, dapo, gspo, rloo, reinforce_pp[_baseline] or cispo.")
@click.option("--mode", help="sync (default) or async.")
@click.option("--group-size", type=int, help="Completions per prompt; 8 by default.")
@click.option("--groups-per-step", type=int, help="Prompts per training step; 8 by default.")
@click.option("--max-tokens", type=int, help="Longest completion; 256 by default.")
@click.option("--temperature", type=float, help="Of the samples; 1 by default.")
@click.option("--learning-rate", type=float, help="Highest learning rate; 1e-5 by default.")
@click.option("--device", help="cpu; training on a GPU is refused for now.")
@click.option("--dtype", help="bfloat16 (default) or float32.")
@click.option("--serve-port", type=int, help="Serve the policy over HTTP on this port while it is trained; 0: any.")
@click.option("--keep-serving", is_flag=True, help="Go on serving after the last step, until Ctrl-C.")
@click.option("--log-level", help="debug, info, warning (default here) or error.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file with settings.")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="One setting; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and the plan, and stop.")
@click.pass_context
def train(context: click.Context, dry_run: bool, keep_serving: bool, **options: Any) -> None:
    """Train a model by reinforcement, and serve it meanwhile. `train samples RUN` shows what it was trained on."""
    if context.invoked_subcommand is not None:
        return
    config = resolve(options)
    if dry_run:
        from .plan import print_plan

        print_plan(config)
        return
    setup_logging("supervisor", config.serve.log_level)
    sys.exit(run(config, keep_serving))


def resolve(options: dict[str, Any]) -> TrainConfig:
    """Stored configuration of a resumed run, TOML, --set and named options, each over the one before.

    Raises:
        ConfigError: a setting is wrong, there is no model, or the run directory holds another run.
    """
    from .supervisor import holds_a_run

    given = read_settings(options.pop("config_file"), options.pop("assignments"))
    is_resumed, serve_port = options.pop("resume"), options.pop("serve_port")
    for option, value in options.items():
        if value is not None:
            put(given, OPTIONS[option], value)
    if serve_port is not None:
        put(given, "serve.network.port", serve_port)
        put(given, "serve.network.is_enabled", True)
    run_dir = Path(given.get("serve", {}).get("run_dir") or ".").absolute()
    has_run_dir = bool(given.get("serve", {}).get("run_dir"))
    values: dict[str, Any] = {"serve": {"network": {"is_enabled": False}, "log_level": "warning"}}
    if is_resumed:
        if not has_run_dir or not (run_dir / CONFIG_FILE).exists():
            raise ConfigError("run_dir", f"is {run_dir}, which holds no run to go on with; give --run-dir")
        try:
            values = json.loads((run_dir / CONFIG_FILE).read_text())
        except ValueError as error:
            raise ConfigError("run_dir", f"is {run_dir}, whose {CONFIG_FILE} can't be read: {error}") from error
    elif has_run_dir and holds_a_run(run_dir):
        raise ConfigError("run_dir", f"is {run_dir}, which holds a run already; --resume it, or choose another")
    config = TrainConfig.from_dict(_merged(values, given))
    model = Path(config.serve.model)
    if not config.serve.model or not (model / "config.json").is_file():
        raise ConfigError("model", f"is {config.serve.model!r}; give a Hugging Face directory (bin/fetch-model "
                          "makes one)")  # fmt: skip
    resolved = config.to_dict()
    resolved["serve"]["model"] = str(model.absolute())
    resolved["task"]["source"] = absolute_source(config.task.source)
    rewards = filter(None, map(str.strip, config.task.rewards.split(",")))
    resolved["task"]["rewards"] = ",".join(map(absolute_source, rewards))
    resolved["serve"]["run_dir"] = str(run_dir) if has_run_dir else ""
    return TrainConfig.from_dict(resolved)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        is_section = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if is_section else value
    return merged


def _ignore(_: Any) -> None:
    """Nobody else wants to know."""


def run(
    config: TrainConfig, keep_serving: bool = False, on_ready: Callable[[dict[str, Any]], None] = _ignore,
    on_report: Callable[[Report], None] = _ignore,
) -> int:  # fmt: skip
    """One run from start to end, shown on the terminal; returns the exit code. `on_ready` and `on_report` are told what
    the terminal is told.

    Raises:
        ConfigError, ProcessFailedError: it couldn't be started, or a process failed for good.
    """
    from .curves import draw_curves, held_out_change
    from .progress import ProgressDisplay
    from .supervisor import TrainSupervisor

    display = ProgressDisplay()

    def show_ready(run: dict[str, Any]) -> None:
        display.console.print(
            f"ready: {run['url'] or 'no HTTP'} model={run['model']} run_dir={run['run_dir']}", soft_wrap=True
        )
        on_ready(run)

    def show_report(report: Report) -> None:
        display.on_report(report)
        on_report(report)

    supervisor = TrainSupervisor(config, show_ready, show_report, keep_serving)
    display.start()
    try:
        supervisor.run()
    finally:
        display.stop()
    run_dir = supervisor.run_dir
    change = held_out_change(run_dir)
    if change is not None:
        display.console.print(f"held-out reward: {change[0]:.3f} at the beginning, {change[1]:.3f} now")
    try:
        display.console.print(f"curves: {draw_curves(run_dir)}", soft_wrap=True)
    except ConfigError as error:
        display.console.print(f"no curves: {error}", soft_wrap=True)
    if supervisor.is_done:
        return 0
    display.console.print(
        f"stopped before the last step; go on with: bin/train --run-dir {run_dir} --resume", soft_wrap=True
    )
    return EXIT_INTERRUPTED


@train.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Of this step only.")
@click.option("--state", help="Only prompts in this state: trained, dropped, rejected, evaluated or issued.")
@click.option("--order", type=int, help="Of this order only.")
@click.option("--limit", default=40, help="Rows at most.")
def samples(run_dir: Path, step: int | None, state: str | None, order: int | None, limit: int) -> None:
    """What a run was trained on, and how every prompt has ended."""
    from .samples import show_samples

    show_samples(run_dir, step, state, order, limit)


@train.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="JSON for scripts.")
@click.option("--max-staleness", type=int, help="Bound to hold samples to, where the run's own isn't known.")
def audit(run_dir: Path, as_json: bool, max_staleness: int | None) -> None:
    """Prove from a run's ledger that everything adds up. Exit code 1 where something doesn't."""
    from .audit_table import show_audit

    sys.exit(show_audit(run_dir, as_json, max_staleness))


@train.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
def curves(run_dir: Path) -> None:
    """Draw a run's curves into RUN_DIR/curves.png."""
    from .curves import draw_curves

    click.echo(draw_curves(run_dir))


def main() -> None:
    """Run the command line; exit with 78 for a configuration that can't be, 70 for a fault, 75 when interrupted."""
    run_command(train, os.environ.get("UNISON_PROG", "train"))


if __name__ == "__main__":
    main()
