"""Built-in tasks: small, without downloads, each learnt by a 135M chat model in minutes.

Owns: their prompts and rewards. Every prompt is made from a seed, so every process that loads a task has the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from .prompts import Prompt
from .task import Task

_WORDS = (
    "apple bread chair dance eagle flame grape house ice juice knife lemon mouse night ocean piano queen river stone "
    "table uncle voice water zebra amber brush cloud dream earth field ghost heart ivory jelly koala light magic nurse "
    "olive paper quilt robot sugar tiger umbra vapor wheat yacht anchor button candle dragon engine forest garden "
    "hammer island jacket kettle ladder market needle orange pencil rabbit saddle tunnel velvet window"
).split()
NUM_TRAIN, NUM_HELD_OUT = 2048, 256
MAX_DIGITS = 9
MAX_DRAWS = 20
"""Draws per question that is needed, until the options are called too narrow."""


def answer_of(completion: Any) -> str:
    """Text of a completion as the reward functions get it."""
    text = completion if isinstance(completion, str) else completion[0]["content"]
    return str(text).strip()


def _words_in(text: str) -> list[str]:
    cleaned = "".join(char if char.isalpha() or char.isspace() else " " for char in text.lower())
    return cleaned.split()


def sorted_words(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for exactly the words in order; else up to 0.4: by the share of the right words, less for others besides."""
    scores = []
    for completion, wanted in zip(completions, answer, strict=True):
        words, right = _words_in(answer_of(completion)), wanted.split()
        if words == right:
            scores.append(1.0)
            continue
        found = len(set(words) & set(right)) / len(right)
        extra = max(0, len(words) - len(right))
        in_order = sum(a == b for a, b in zip(words, right, strict=False)) / len(right)
        scores.append((0.2 * found + 0.2 * in_order) / (1 + extra))
    return scores


def right_number(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for the number alone; another number alone up to 0.1, by how close it is, so that wrong answers differ too;
    0.1 where the number stands in a longer answer."""
    scores = []
    for completion, wanted in zip(completions, answer, strict=True):
        text = answer_of(completion).rstrip(".")
        if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS:
            distance = abs(int(text) - int(wanted)) / max(10, int(wanted))
            scores.append(1.0 if distance == 0 else 0.1 * max(0.0, 1.0 - distance))
            continue
        numbers = "".join(char if char.isascii() and char.isdecimal() else " " for char in text).split()
        scores.append(0.1 if wanted in numbers else 0.0)
    return scores


def right_word(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for the word alone; else 0.4 by the number of words in which it stands last or at all."""
    scores = []
    for completion, wanted in zip(completions, answer, strict=True):
        words = _words_in(answer_of(completion))
        scores.append(1.0 if words == [wanted] else 0.4 / len(words) if wanted in words else 0.0)
    return scores


def _task(name: str, seed: int, make: Callable[[random.Random], tuple[str, str]], reward: Callable[..., Any]) -> Task:
    """`make` gives question and answer; equal questions come once."""
    draw = random.Random(f"{name}-{seed}")
    seen: dict[str, str] = {}
    wanted = NUM_TRAIN + NUM_HELD_OUT
    for _ in range(MAX_DRAWS * wanted):
        question, answer = make(draw)
        seen.setdefault(question, answer)
        if len(seen) == wanted:
            break
    else:
        raise ValueError(f"only {len(seen)} different questions were found, {wanted} are needed; widen the options")
    prompts = [
        Prompt(f"{name}-{index}", ({"role": "user", "content": question},), columns={"answer": answer})
        for index, (question, answer) in enumerate(seen.items())
    ]
    return Task(prompts[NUM_HELD_OUT:], prompts[:NUM_HELD_OUT], [reward])


def sort_words(seed: int = 0, num_words: int = 3) -> Task:
    """Sort three words alphabetically."""

    def make(draw: random.Random) -> tuple[str, str]:
        words = draw.sample(_WORDS, num_words)
        question = f"Sort these words alphabetically: {', '.join(words)}. Answer with the sorted words only."
        return question, " ".join(sorted(words))

    return _task("sort-words", seed, make, sorted_words)


def add_numbers(seed: int = 0, below: int = 50) -> Task:
    """Add two numbers."""

    def make(draw: random.Random) -> tuple[str, str]:
        first, second = draw.randrange(below), draw.randrange(below)
        return f"What is {first} + {second}? Answer with the number only.", str(first + second)

    return _task("add-numbers", seed, make, right_number)


def last_word(seed: int = 0, num_words: int = 4) -> Task:
    """Repeat the last word of a list."""

    def make(draw: random.Random) -> tuple[str, str]:
        words = draw.sample(_WORDS, num_words)
        return f"Here is a list of words: {', '.join(words)}. Repeat only the last word.", words[-1]

    return _task("last-word", seed, make, right_word)


BUILTIN_TASKS: dict[str, Callable[..., Task]] = {
    "sort-words": sort_words, "add-numbers": add_numbers, "last-word": last_word,
}  # fmt: skip
"""By the name that the configuration takes."""
