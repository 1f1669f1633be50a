"""Entry point of bin/bench: runs contenders alternately, prints medians and ratios, writes JSON where asked.

`engine` compares with transformers, `walls` says what the processes around the engine cost, `updates` what a stream of
new versions costs the requests in flight, `train` compares with TRL.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path

import torch

from ...engine.config import available_cores
from .contenders import Contender, Measurement, TransformersContender, UnisonContender
from .training import measure_training
from .updates import measure_updates
from .walls import measure_walls, print_rows
from .workloads import Workload, decode, rollout

_SYSTEM = "You are a careful assistant. " + "Read the question, think about what is asked, and answer it briefly. " * 5
_TOPICS = "rivers stars bread music trees ships clocks bridges paper glass horses maps salt wool tea snow".split()


def main() -> int:
    """Parse arguments, run, print."""
    options = _parse()
    if options.what == "walls":
        rows = measure_walls(options.model, options.dtype, options.repeats, options.new_tokens)
        return print_rows(rows, options.json)
    if options.what == "train":
        rows = measure_training(options.model, options.dtype, options.task, options.steps, options.threads)
        return print_rows(rows, options.json)
    if options.what == "updates":
        return print_rows(measure_updates(options.model, options.dtype, options.duration_s), options.json)
    workloads = _workloads(options)
    contenders = _contenders(options)
    table: dict[str, dict[str, list[Measurement]]] = {work.name: {c.name: [] for c in contenders} for work in workloads}
    for work in workloads:
        for repeat in range(options.repeats):
            for contender in contenders if repeat % 2 == 0 else reversed(contenders):
                measured = contender.run(work)
                table[work.name][contender.name].append(measured)
                print(
                    f"  {work.name}: {contender.name} {measured.seconds:.2f} s, {measured.tokens_per_s:.1f} tokens/s",
                    file=sys.stderr,
                    flush=True,
                )
    _print(table, [contender.name for contender in contenders])
    if options.json:
        Path(options.json).write_text(json.dumps(_report(table, options), indent=2))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "bench", description="Speed beside transformers generate, as ratios taken in one run; cost of the processes."
    )
    parser.add_argument("what", nargs="?", default="engine", choices=("engine", "walls", "updates", "train"))
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face directory (bin/fetch-model makes one)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--repeats", type=int, default=3, help="runs per contender and workload; medians are shown")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens per completion")
    parser.add_argument("--only", default="", help="run the workloads whose name contains this")
    parser.add_argument("--without-inexact", action="store_true", help="leave out torch's fastest inexact path")
    parser.add_argument("--without-transformers", action="store_true", help="leave out transformers")
    parser.add_argument("--duration-s", type=float, default=60.0, help="updates: seconds per rule")
    parser.add_argument("--task", default="sort-words", help="train: built-in task")
    parser.add_argument("--steps", type=int, default=6, help="train: steps of 64 samples per trainer")
    parser.add_argument("--json", help="also write all measurements to this file")
    return parser.parse_args()


def _workloads(options: argparse.Namespace) -> list[Workload]:
    from transformers import AutoTokenizer  # noqa: PLC0415 - an extra, and slow to import

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    vocab_size, new_tokens = len(tokenizer), options.new_tokens
    system = tokenizer(_SYSTEM)["input_ids"][:100]
    questions = [
        tokenizer(f"Tell me about {topic}. " + f"What should one know of {topic}, and why? " * 12)["input_ids"][
            : 90 + 2 * at
        ]
        for at, topic in enumerate(_TOPICS)
    ]
    every = [decode(batch, 128, new_tokens, vocab_size) for batch in (1, 8, 32, 64)]
    every += [decode(1, 2048, new_tokens, vocab_size), rollout(system, questions, new_tokens)]
    return [work for work in every if options.only in work.name]


def _contenders(options: argparse.Namespace) -> list[Contender]:
    model, dtype, threads = options.model, options.dtype, options.threads
    contenders: list[Contender] = [UnisonContender("unison exact", model, dtype, threads, "auto", True)]
    if not options.without_inexact:
        contenders.append(UnisonContender("unison inexact", model, dtype, threads, "torch", False))
    if not options.without_transformers:
        contenders.append(TransformersContender(model, dtype, threads))
    return contenders


def _print(table: dict[str, dict[str, list[Measurement]]], names: list[str]) -> None:
    """One line per workload: median tokens/s of each contender, and the first one's ratio to each other one."""
    others = names[1:]
    print(
        "| workload | "
        + " | ".join(f"{name}, tokens/s" for name in names)
        + "".join(f" | x {name}" for name in others)
        + " |"
    )
    print("|---" * (1 + len(names) + len(others)) + "|")
    for work, by_name in table.items():
        rates = {name: statistics.median(m.tokens_per_s for m in runs) for name, runs in by_name.items()}
        cells = [f"{rates[name]:.1f}" for name in names] + [f"{rates[names[0]] / rates[name]:.2f}" for name in others]
        print(f"| {work} | " + " | ".join(cells) + " |")


def _report(table: dict[str, dict[str, list[Measurement]]], options: argparse.Namespace) -> dict[str, object]:
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "threads": options.threads},
        "torch": torch.__version__,
        "dtype": options.dtype,
        "new_tokens": options.new_tokens,
        "workloads": {
            work: {
                name: [vars(run) | {"tokens_per_s": run.tokens_per_s} for run in runs] for name, runs in by_name.items()
            }
            for work, by_name in table.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
