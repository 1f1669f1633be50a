"""JSON lines between the bench and a contender's process: load, then any number of runs, until standard input ends.

Owns the child's side: a loop over standard input, and standard output, which is kept for answers only (what libraries
print goes to standard error). Uses the standard library alone; the bench's side is `contenders.py`.

    {"load": {"model": DIR, "dtype": "bfloat16", "threads": 2, "cache": DIR}}
        → {"ready": {"versions": {NAME: VERSION}, "logprobs": "all", "notes": "how it is called"}}
    {"run": {"prompts": [[1, 2]], "n": 1, "max_tokens": 8, "temperature": 0.0, "ignore_eos": true}}
        → {"seconds": 1.5, "num_tokens": 8}
    either → {"error": "what went wrong"}, after which the process ends
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any


@dataclass(frozen=True)
class Load:
    """What a driver is to load."""

    model: str
    """Hugging Face directory."""
    dtype: str
    """`bfloat16` or `float32`."""
    threads: int
    """Threads to compute with."""
    cache: str
    """A folder for converted copies of the model, which the next run finds again."""
    options: dict[str, Any] = field(default_factory=dict)
    """What this driver alone understands."""


@dataclass(frozen=True)
class Work:
    """A batch of prompts, each completed `n` times."""

    prompts: list[list[int]]
    """Token ids."""
    n: int
    """Completions per prompt."""
    max_tokens: int
    """Most tokens per completion."""
    temperature: float
    """0 is greedy."""
    ignore_eos: bool
    """True: every completion has `max_tokens` tokens."""


@dataclass(frozen=True)
class Loaded:
    """A driver that is ready."""

    run: Callable[[Work], tuple[float, int]]
    """Generates everything; returns seconds by its own clock, and generated tokens, the stop token included."""
    packages: tuple[str, ...]
    """Distributions whose versions are reported."""
    logprobs: str
    """Which log-probs come with the tokens: `all`, or what is missing."""
    notes: str
    """How the engine is called, in a sentence."""


def speak(load: Callable[[Load], Loaded]) -> int:
    """Answer until standard input ends. Returns the exit code: 1 after an error, which was answered too."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # libraries print; only answers may go to the bench
    loaded = None
    for line in sys.stdin:
        try:
            message = json.loads(line)
            if "load" in message:
                loaded = load(Load(**message["load"]))
                answer: dict[str, Any] = {"ready": _describe(loaded)}
            elif loaded is None:
                raise ValueError("a run before anything was loaded")
            else:
                seconds, num_tokens = loaded.run(Work(**message["run"]))
                answer = {"seconds": seconds, "num_tokens": num_tokens}
        except Exception as error:  # the outermost loop: reported, and the end of this process
            traceback.print_exc()
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
            return 1
        answers.write(json.dumps(answer) + "\n")
    return 0


def stop_tokens(model: str) -> set[int]:
    """The token ids that end a completion, from generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        try:
            with open(os.path.join(model, name), encoding="utf-8") as file:
                found = json.load(file).get("eos_token_id")
        except FileNotFoundError:
            continue
        if found is not None:
            return set(found) if isinstance(found, list) else {found}
    return set()


def count_tokens(rows: list[list[int]], stops: set[int], work: Work) -> int:
    """Generated tokens of completions that may be padded behind their stop token, which counts."""
    if work.ignore_eos:
        return sum(map(len, rows))
    return sum(next((at + 1 for at, token in enumerate(row) if token in stops), len(row)) for row in rows)


def _describe(loaded: Loaded) -> dict[str, Any]:
    versions = {"python": sys.version.split()[0]} | {name: version(name) for name in loaded.packages}
    return {"versions": versions, "logprobs": loaded.logprobs, "notes": loaded.notes}
