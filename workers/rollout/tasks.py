"""Tasks: where they come from.

A source is a built-in name, `FILE.py:NAME` (a Task, a subclass of it, or a function that returns one), `jsonl:PATH`
with reward functions named in the configuration, or `reasoning_gym:NAME` (an extra). Loading is deterministic: trainer,
rollout workers and scorers each load the task and see the same prompts under the same indices.

Owns: loading. Knows nothing of tokens or processes.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from ...ipc.errors import ConfigError
from .builtin import BUILTIN_TASKS
from .prompts import Message, Prompt, messages_of
from .records import HELD_OUT, TRAIN
from .rewards import Reward
from .task import Task

HELD_OUT_SHARE = 10
"""One row in so many of a source without splits of its own is held out."""


def load_task(source: str, rewards: str = "", options: str = "") -> Task:
    """The task that a configuration names.

    Raises:
        ConfigError: there is no such task, or it can't be loaded; the text says why.
    """
    try:
        arguments = json.loads(options or "{}")
    except ValueError as error:
        raise ConfigError("task.options", f"is {options!r}; must be a JSON object: {error}") from error
    if not isinstance(arguments, dict):
        raise ConfigError("task.options", f"is {options!r}; must be a JSON object")
    if rewards and not source.startswith("jsonl:"):
        raise ConfigError("task.rewards", f"is {rewards!r}; only a jsonl: source takes it, others bring their own")
    try:
        return _load(source, rewards, arguments)
    except ConfigError:
        raise
    except Exception as error:  # a task is the user's program: it may raise anything
        raise ConfigError("task.source", f"is {source!r}, which can't be loaded: {error!r}"[:2000]) from error


def absolute_source(source: str) -> str:
    """A source that means the same in every working directory."""
    kind, _, rest = source.partition(":")
    if kind == "jsonl" and rest:
        return f"jsonl:{Path(rest).absolute()}"
    return f"{Path(kind).absolute()}:{rest}" if kind.endswith(".py") else source


def _load(source: str, rewards: str, arguments: dict[str, Any]) -> Task:
    kind, _, rest = source.partition(":")
    if kind == "jsonl":
        return jsonl_task(Path(rest), _named_rewards(rewards), **arguments)
    if kind == "reasoning_gym":
        return reasoning_gym_task(rest, **arguments)
    if kind.endswith(".py"):
        return _task_of(load_name(source, "task.source"), arguments)
    if source in BUILTIN_TASKS:
        return BUILTIN_TASKS[source](**arguments)
    raise ConfigError("task.source", f"is {source!r}; known are {', '.join(BUILTIN_TASKS)}, FILE.py:NAME, jsonl:PATH "
                      "and reasoning_gym:NAME")  # fmt: skip


def _task_of(value: Any, arguments: Mapping[str, Any]) -> Task:
    task = value if isinstance(value, Task) else value(**arguments)
    if not isinstance(task, Task):
        raise TypeError(f"it gave a {type(task).__name__}, not a Task")
    return task


def load_name(source: str, field: str) -> Any:
    """The object behind `FILE.py:NAME`.

    Raises:
        ConfigError: there is no such file or name.
    """
    file, _, name = source.partition(":")
    path = Path(file).absolute()
    if not path.is_file() or not name:
        raise ConfigError(field, f"is {source!r}; give an existing FILE.py, a colon, and a name in it")
    module_name = f"unison_user_{xxhash.xxh3_64_hexdigest(str(path).encode())}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    if not hasattr(module, name):
        raise ConfigError(field, f"is {source!r}, but {file} has no {name}")
    return getattr(module, name)


def _named_rewards(rewards: str) -> list[Reward]:
    """`FILE.py:NAME[=WEIGHT]`, several by comma."""
    found = []
    for part in filter(None, map(str.strip, rewards.split(","))):
        name, _, weight = part.partition("=")
        try:
            found.append(Reward(load_name(name, "task.rewards"), float(weight or 1.0)))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError("task.rewards", f"has the weight {weight!r}; must be a number") from error
    if not found:
        raise ConfigError("task.rewards", "is empty; a jsonl: source needs FILE.py:NAME of at least one function")
    return found


def jsonl_task(path: Path, rewards: Sequence[Reward]) -> Task:
    """One JSON object per line: `messages`, or `prompt` (a text, or messages), or `instruction`/`input`/`output`. `id`
    and `split` (`train` or `held_out`) are optional; without splits every tenth row, by hash of its id, is held out.
    All other keys are columns for the reward functions."""
    splits: dict[str, list[Prompt]] = {TRAIN: [], HELD_OUT: []}
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"line {number} of {path} isn't an object")
            prompts.append((row.get("split"), _prompt_of(row, str(row.get("id", number)))))
    has_splits = any(split is not None for split, _ in prompts)
    for split, prompt in prompts:
        is_held_out = xxhash.xxh3_64_intdigest(prompt.prompt_id.encode()) % HELD_OUT_SHARE == 0
        chosen = split if has_splits else HELD_OUT if is_held_out else TRAIN
        if chosen not in splits:
            raise ValueError(f"prompt {prompt.prompt_id} has the split {chosen!r}; must be {TRAIN} or {HELD_OUT}")
        splits[chosen].append(prompt)
    if not splits[HELD_OUT] and len(splits[TRAIN]) > 1 and not has_splits:
        splits[HELD_OUT].append(splits[TRAIN].pop())
    return Task(splits[TRAIN], splits[HELD_OUT], rewards)


def _prompt_of(row: Mapping[str, Any], prompt_id: str) -> Prompt:
    columns = {name: value for name, value in row.items() if name not in ("id", "split", "messages", "prompt")}
    asked = row.get("messages") or row.get("prompt")
    messages: tuple[Message, ...] = ()
    if isinstance(asked, str):
        return Prompt(prompt_id, text=asked, columns=columns)
    if asked is not None:
        messages = tuple(dict(message) for message in asked)
    else:
        # The output is what is to be learnt, so it is known to the reward functions and not shown to the model.
        messages = messages_of({name: value for name, value in row.items() if name != "output"})
    if not messages:
        raise ValueError(f"row {prompt_id} has neither messages, nor prompt, nor instruction or input")
    return Prompt(prompt_id, messages, columns=columns)


def reasoning_gym_task(name: str, num_train: int = 4096, num_held_out: int = 256, seed: int = 0, **config: Any) -> Task:
    """A data set of the reasoning-gym package, scored by its own verifier."""
    try:
        import reasoning_gym  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("task.source", "needs the package reasoning-gym: pip install 'unison-rl[tasks]'") from error
    total = num_train + num_held_out
    dataset = reasoning_gym.create_dataset(name, size=total, seed=seed, **config)
    ask = "Answer with the result only.\n"
    rows = [dataset[index] for index in range(total)]

    def verified(completions: list[Any], row: list[int], **_: Any) -> list[float]:
        """Score of reasoning-gym's verifier, in [0, 1]."""
        texts = [completion[0]["content"].strip() for completion in completions]
        return [float(dataset.score_answer(text, rows[index])) for text, index in zip(texts, row, strict=True)]

    # The first occurrence of a question counts, so that none is in both splits.
    questions: dict[str, int] = {}
    for index in range(total - 1, -1, -1):
        questions[rows[index]["question"]] = index
    kept = sorted(questions.values())
    prompts = [
        Prompt(f"{name}-{index}", ({"role": "user", "content": ask + rows[index]["question"]},), columns={"row": index})
        for index in kept
    ]
    split = max(1, len(prompts) - num_held_out)
    return Task(prompts[:split], prompts[split:], [Reward(verified)])
