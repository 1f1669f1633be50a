"""Demo: a built-in task learnt in minutes, with the policy served over HTTP meanwhile and asked after each evaluation.

Owns: the settings that suit a 135M chat model on two cores, and what is printed. Called by bin/demo.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import click

from ..cli import run_command
from ..process import Report
from ..rollout.tasks import load_task
from .checkpoint import checkpoints
from .cli import resolve, run
from .config import TrainConfig
from .curves import held_out_change

SETTINGS: dict[str, Any] = {
    "steps": 40,
    "rollout": {"groups_per_step": 8, "group_size": 8, "max_tokens": 16, "zero_variance": "drop"},
    "optimizer": {"learning_rate": 3e-5},
    "evaluation": {"interval_steps": 10},
    "checkpoint": {"interval_steps": 0},
    "serve": {"engine": {"cache": {"num_tokens": 32768}}},
}
ANSWER_S = 30.0


@click.command("demo", context_settings={"show_default": True})
@click.option("--model", required=True, help="Hugging Face directory.")
@click.option("--task", default="last-word", help="Built-in task.")
@click.option("--steps", type=int, help="Training steps; 40 by default.")
@click.option("--seed", default=0, help="Decides the order of prompts and every draw.")
@click.option("--port", default=8000, help="The policy is served here while it is trained; 0 takes a free port.")
@click.option("--run-dir", default="demo-run", help="Directory of the run; a number is added where it is taken.")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="One setting; may be repeated.")
def demo(model: str, task: str, port: int, run_dir: str, assignments: tuple[str, ...], **options: Any) -> None:
    """Train a small chat model on a small task, and chat with it meanwhile."""
    config = _configuration({"model": model, "task": task, **options}, port, _free(Path(run_dir)), assignments)
    guide = _Guide(config)
    code = run(config, on_ready=guide.on_ready, on_report=guide.on_report)
    guide.say_goodbye()
    raise click.exceptions.Exit(code)


def _configuration(
    options: dict[str, Any], port: int, run_dir: Path, assignments: tuple[str, ...]
) -> TrainConfig:
    flat = [f"{name}={json.dumps(value)}" for name, value in _flat(SETTINGS, "")]
    return resolve({
        **options, "run_dir": str(run_dir), "serve_port": port, "resume": False, "config_file": None,
        "assignments": (*flat, *assignments),
    })  # fmt: skip


def _flat(values: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        found += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return found


def _free(run_dir: Path) -> Path:
    """The directory, or the first one of its name with a number that isn't there yet."""
    tries = [run_dir, *(run_dir.with_name(f"{run_dir.name}-{number}") for number in range(2, 10_000))]
    return next(path for path in tries if not path.exists()).absolute()


class _Guide:
    """Says what happens. Asks the served policy a held-out question in a thread, so that nothing waits for it."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        prompt = load_task(config.task.source, options=config.task.options).held_out[0]
        self._messages = [dict(message) for message in prompt.messages]
        self._url = ""

    def on_ready(self, run: dict[str, Any]) -> None:
        """The policy can be asked from now on."""
        self._url = run["url"]
        click.echo("The model is served while it learns. Try, in another terminal:\n" + self._curl(self._url))

    def on_report(self, report: Report) -> None:
        """After each evaluation: ask the same question again."""
        if report.kind == "evaluation" and self._url:
            threading.Thread(target=self._ask, daemon=True).start()

    def say_goodbye(self) -> None:
        """Where the picture is, and how to go on."""
        run_dir = Path(self._config.serve.run_dir)
        change = held_out_change(run_dir)
        if change is None:
            return
        click.echo(f"\nHeld-out reward: {change[0]:.2f} before, {change[1]:.2f} after. Picture: {run_dir}/curves.png")
        newest = checkpoints(run_dir)[-1]
        click.echo(f"Serve the trained model, and ask it:\n  bin/serve --model {newest} --served-name "
                   f"{self._config.serve.name} --port 8000\n{self._curl('http://127.0.0.1:8000')}")  # fmt: skip

    def _body(self) -> dict[str, Any]:
        return {"model": self._config.serve.name, "temperature": 0, "max_tokens": 16, "messages": self._messages}

    def _curl(self, url: str) -> str:
        return f"  curl -s {url}/v1/chat/completions -d '{json.dumps(self._body())}'"

    def _ask(self) -> None:
        request = Request(
            f"{self._url}/v1/chat/completions", json.dumps(self._body()).encode(), {"content-type": "application/json"}
        )
        try:
            with urlopen(request, timeout=ANSWER_S) as reply:
                answer = json.loads(reply.read())["choices"][0]["message"]["content"]
        except OSError as error:
            answer = f"(no answer: {error})"
        click.echo(f"  over HTTP, {self._messages[-1]['content']}\n    → {answer.strip()!r}")


def main() -> None:
    """Run the command line."""
    run_command(demo, os.environ.get("UNISON_PROG", "demo"))


if __name__ == "__main__":
    main()
