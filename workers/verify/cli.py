"""The command line of bin/verify: which samples, from where, and what is said of them.

Owns: parsing, progress, printing. Errors of ours are printed as one line, with the exit codes of bin/serve.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...engine.models.layout import WeightLayout
from ...ipc.errors import ConfigError
from ..cli import run_command
from ..trainer.stored import StoredRun
from .case import Case, CaseFile, LedgerCases, as_json
from .comparison import Tolerance
from .report import Summary
from .sources import WeightSources
from .surroundings import Surroundings
from .verdict import SampleReport
from .verifier import Verifier

WIDE_COLUMNS = 240


@click.command("verify", context_settings={"show_default": True})
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--all", "is_all", is_flag=True, help="Every sample of the run.")
@click.option("--order", "orders", type=int, multiple=True, help="The samples of this order; may be repeated.")
@click.option("--step", "steps", type=int, multiple=True, help="The samples of this training step; may be repeated.")
@click.option("--sample", "indices", type=int, multiple=True, help="Only these of each group; may be repeated.")
@click.option("--weights", "places", type=click.Path(path_type=Path), multiple=True,
              help="A further model directory, or a run, that may have weights; may be repeated.")  # fmt: skip
@click.option("--tolerance", default=Tolerance().logprob, help="Largest difference of a log-prob, and of a draw in "
              "probability, where bits can't be asked for.")  # fmt: skip
@click.option("--no-prompts", is_flag=True, help="Load no task: neither prompts nor rewards are looked at.")
@click.option("--no-rewards", is_flag=True, help="Call no reward function.")
@click.option("--allow-unverifiable", is_flag=True, help="Exit code 0 also where weights weren't kept.")
@click.option("--threads", type=int, help="CPU threads; all cores by default.")
@click.option("--json", "as_json_", is_flag=True, help="JSON for scripts.")
@click.option("--export", type=click.Path(path_type=Path), help="Write the chosen samples as a file of their own, and "
              "verify nothing.")  # fmt: skip
def verify(source: Path, orders: tuple[int, ...], steps: tuple[int, ...], is_all: bool, **options: Any) -> None:
    """Prove stored samples from outside: SOURCE is a run's directory, or a JSON file of samples.

    Exit code 0: all is bit-equal, or within tolerance where the run didn't claim exactness. 1: something differs.
    3: nothing does, but the weights of some versions weren't kept.
    """
    with ExitStack() as stack:
        if source.is_dir():
            if not (is_all or orders or steps):
                raise ConfigError("source", f"is the run {source}; say which samples: --all, --order N or --step N")
            selection = _of_run(stack.enter_context(StoredRun(source)), orders, steps)
        else:
            selection = _of_file(source)
        if options["export"] is not None:
            _export(selection, options["export"], options["indices"])
            return
        sys.exit(_verify(selection, options))


class _Selection:
    """What is to be verified, and where its weights may be."""

    def __init__(self, model: Path, first_digest: str | None, runs: Iterable[Path], cases: Iterable[Case],
                 num_cases: int) -> None:  # fmt: skip
        self.model = model
        self.first_digest = first_digest
        self.runs = list(runs)
        self.cases = cases
        self.num_cases = num_cases


def _of_run(run: StoredRun, orders: tuple[int, ...], steps: tuple[int, ...]) -> _Selection:
    ledger = LedgerCases(run)
    chosen = ledger.select(orders, steps)
    if not chosen:
        raise ConfigError("order", f"none of the chosen orders of {run.run_dir} has samples")
    config = run.settings_of(None).config or next(
        (each.config for each in run.settings.values() if each.config is not None), None
    )
    if config is None:
        raise ConfigError("source", f"is {run.run_dir}: {run.settings_of(None).trouble}")
    model = Path(config.serve.model)
    if not (model / "config.json").is_file():
        raise ConfigError("source", f"is a run that began with {model}, which is gone; put it back there")
    return _Selection(model, ledger.first_digest, [run.run_dir], ledger.cases(chosen), len(chosen))


def _of_file(path: Path) -> _Selection:
    found = CaseFile.read(path)
    return _Selection(found.model, None, found.sources, found.cases, len(found.cases))


def _verify(selection: _Selection, options: dict[str, Any]) -> int:
    started_s, summary, reports = monotonic(), Summary(), []
    indices, tolerance = options["indices"], Tolerance(options["tolerance"], options["tolerance"])

    def open_sources(layout: WeightLayout) -> WeightSources:
        sources = WeightSources(layout)
        sources.add_directory(selection.model, selection.first_digest)
        for place in (*selection.runs, *options["places"]):
            if (place / "config.json").is_file():
                sources.add_directory(place)
            sources.add_run(place)
        return sources

    with Surroundings(not options["no_prompts"], not options["no_rewards"]) as surroundings:
        verifier = Verifier(selection.model, open_sources, surroundings, tolerance, options["threads"])
        with _progress(selection.num_cases) as advance:
            for case in selection.cases:
                for report in verifier.verify(case):
                    if not indices or report.index in indices:
                        summary.add(report)
                        reports.append(report)
                advance()
        summary.damaged = verifier.damaged
    summary.seconds = monotonic() - started_s
    _print(summary, reports, options["as_json_"])
    return summary.exit_code(options["allow_unverifiable"])


def _print(summary: Summary, reports: list[SampleReport], as_json_: bool) -> None:
    if as_json_:
        click.echo(json.dumps(summary.to_json() | {"samples": [asdict(each) for each in reports]}))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE_COLUMNS)
    summary.show(console, reports)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on a terminal, nothing elsewhere; yields what moves it on by one case."""
    console = Console(stderr=True)
    if not console.is_terminal or total < 2:
        yield lambda: None
        return
    columns = (TextColumn("groups"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("groups", total=total)
        yield lambda: bar.advance(task)


def _export(selection: _Selection, path: Path, indices: tuple[int, ...]) -> None:
    cases = [replace(case, samples=tuple(each for each in case.samples if not indices or each.index in indices))
             for case in selection.cases]  # fmt: skip
    values = as_json(cases, selection.model, selection.runs)
    path.write_text(json.dumps(values))
    click.echo(f"{len(values['samples'])} samples: {path}")


def main() -> None:
    """Run bin/verify; exit with 78 for a source that can't be, 70 for a fault."""
    run_command(verify, os.environ.get("UNISON_PROG", "verify"))
