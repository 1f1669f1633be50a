"""Entry point of bin/bench: measures, prints medians and ratios, writes JSON where asked.

`engine` compares with peers (transformers, OpenVINO, llama.cpp, vLLM), `walls` says what the processes around the
engine cost, `updates` what a stream of new versions costs the requests in flight, `train` compares with TRL and a plain
loop, `exactness` compares log-probs over random schedules, `report` writes the tables of docs/performance.md from
docs/measurements.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ...engine.config import available_cores
from ..machine import describe
from . import report
from .comparison import Setting, record
from .contenders import unison_entry
from .environments import RECIPES
from .exactness import measure_exactness
from .limits import measure_limits
from .training import measure_training
from .updates import measure_updates
from .walls import measure_walls
from .workloads import Workload, decode, rollout

_SYSTEM = "You are a careful assistant. " + "Read the question, think about what is asked, and answer it briefly. " * 5
_TOPICS = "rivers stars bread music trees ships clocks bridges paper glass horses maps salt wool tea snow".split()


def main() -> int:
    """Parse arguments, run, print."""
    options = _parse()
    if options.what == "report":
        return report.main(["--check"] if options.check else [])
    measured = _engine(options) if options.what == "engine" else _beside(options)
    print(report.render(measured))
    if options.json:
        Path(options.json).write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    return 0


def _engine(options: argparse.Namespace) -> dict[str, Any]:
    workloads = _workloads(options)
    limits = {} if options.without_limits else measure_limits(options.threads)
    ours = [unison_entry("unison exact", True)]
    if not options.without_inexact:
        ours.append(unison_entry("unison inexact", False))
    setting = Setting(options.model, options.dtype, options.threads, options.repeats)
    return record(setting, ours, options.peers, workloads, limits)


def _beside(options: argparse.Namespace) -> dict[str, Any]:
    """What surrounds the engine: rows of figures, with the machine that they were taken on."""
    if options.what == "walls":
        rows = measure_walls(options.model, options.dtype, options.repeats, options.new_tokens)
    elif options.what == "exactness":
        rows = measure_exactness(options.model, options.dtype, options.schedules)
    elif options.what == "train":
        rows = measure_training(
            options.model, options.dtype, options.task, options.steps, options.threads, options.seeds
        )
    else:
        rows = measure_updates(options.model, options.dtype, options.duration_s)
    about = {"model": options.model.name, "dtype": options.dtype, "threads": options.threads}
    return {"kind": options.what, **describe(), **about, "rows": rows}


def _peers(text: str) -> list[str]:
    """Names from a list with commas; `none` is no peer."""
    names = [] if text == "none" else [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no peer {', '.join(unknown)}; there are {', '.join(RECIPES)}, or none")
    return names


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "bench", description="Speed beside peers, as ratios taken in one run; cost of the processes; training."
    )
    kinds = ("engine", "walls", "updates", "train", "exactness", "report")
    parser.add_argument("what", nargs="?", default="engine", choices=kinds)
    parser.add_argument("--model", type=Path, help="Hugging Face directory (bin/fetch-model makes one)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--repeats", type=int, default=3, help="runs per contender and workload; medians are shown")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens per completion")
    parser.add_argument("--only", default="", help="run the workloads whose name contains this")
    parser.add_argument("--without-inexact", action="store_true", help="leave out torch's fastest inexact path")
    parser.add_argument("--without-limits", action="store_true", help="engine: don't measure the machine's own limits")
    parser.add_argument(
        "--peers", type=_peers, default=["transformers"], metavar="NAME,...",
        help=f"engine: {', '.join(RECIPES)}, or none; each is installed into an environment of its own at first use",
    )  # fmt: skip
    parser.add_argument("--duration-s", type=float, default=60.0, help="updates: seconds per rule")
    parser.add_argument("--task", default="sort-words", help="train: built-in task")
    parser.add_argument("--steps", type=int, default=6, help="train: steps of 64 samples per trainer")
    parser.add_argument("--seeds", type=int, default=3, help="train: runs per trainer, each with another seed")
    parser.add_argument("--schedules", type=int, default=200, help="exactness: how many are drawn")
    parser.add_argument("--json", help="also write all measurements to this file")
    parser.add_argument("--check", action="store_true", help="report: only say whether the page is up to date")
    options = parser.parse_args()
    if options.model is None and options.what != "report":
        parser.error("--model is needed")
    return options


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


if __name__ == "__main__":
    sys.exit(main())
