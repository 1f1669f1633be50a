"""Where tasks come from."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from unison.ipc.errors import ConfigError
from unison.workers.rollout.builtin import BUILTIN_TASKS
from unison.workers.rollout.prompts import Prompt
from unison.workers.rollout.rewards import score_group
from unison.workers.rollout.task import Task
from unison.workers.rollout.tasks import load_task


def total(task: Task, prompt: Prompt, text: str) -> float:
    (score,) = asyncio.run(score_group(task.rewards, prompt, [text], [(1,)]))
    return score.total


@pytest.mark.parametrize("name", BUILTIN_TASKS)
def test_built_in_tasks(name: str) -> None:
    """Deterministic, without a question in both splits; the right answer earns 1, a wrong one less than half."""
    task, again = load_task(name), load_task(name)
    assert task.train == again.train and task.held_out == again.held_out
    questions = [prompt.messages[0]["content"] for prompt in (*task.train, *task.held_out)]
    assert len(set(questions)) == len(questions)
    for prompt in task.held_out[:20]:
        assert total(task, prompt, prompt.columns["answer"]) == 1.0
        assert total(task, prompt, "I would rather talk about the weather today") < 0.5
        assert total(task, prompt, "") == 0.0
    other = load_task(name, options=json.dumps({"seed": 1}))
    assert other.train != task.train


def test_reasoning_gym() -> None:
    """A data set of the package, scored by its own verifier; no question is in both splits."""
    task = load_task("reasoning_gym:basic_arithmetic", options='{"num_train": 40, "num_held_out": 10}')
    import reasoning_gym

    rows = reasoning_gym.create_dataset("basic_arithmetic", size=50, seed=0)
    for prompt in (*task.train[:5], *task.held_out[:5]):
        assert total(task, prompt, rows[prompt.columns["row"]]["answer"]) == 1.0
    texts = [prompt.messages[0]["content"] for prompt in (*task.train, *task.held_out)]
    assert len(set(texts)) == len(texts)


TASK_FILE = """
from unison.workers.rollout import Prompt, Task
def reward(completions, **_): return [0.0] * len(completions)
def make(count=2):
    return Task([Prompt(f"t{i}", text="x") for i in range(count)], [Prompt("h", text="y")], [reward])
class Own(Task):
    def __init__(self):
        super().__init__([Prompt("t", text="x")], [Prompt("h", text="y")], [reward])
ready = make()
number = 3
def broken(): raise OSError("disk")
def twice(): return Task([Prompt("a", text="x")], [Prompt("a", text="x")], [reward])
"""


def test_files(tmp_path: Path) -> None:
    """FILE.py:NAME may be a task, a subclass or a function; options reach it."""
    path = tmp_path / "tasks.py"
    path.write_text(TASK_FILE)
    assert len(load_task(f"{path}:make", options='{"count": 5}').train) == 5
    assert len(load_task(f"{path}:Own").train) == 1 and len(load_task(f"{path}:ready").train) == 2


@pytest.mark.parametrize(
    ("source", "field", "text"),
    [
        ("nothing", "task.source", "known are"), ("FILE:missing", "task.source", "has no missing"),
        ("FILE:number", "task.source", "can't be loaded"), ("FILE:broken", "task.source", "disk"),
        ("FILE:twice", "task.source", "no id may come twice"), ("/none.py:x", "task.source", "existing"),
        ("jsonl:/none.jsonl", "task.rewards", "at least one function"),
        ("reasoning_gym:no_such_thing", "task.source", "can't be loaded"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded(source: str, field: str, text: str, tmp_path: Path) -> None:
    """P50: the error names the setting and says why."""
    path = tmp_path / "tasks.py"
    path.write_text(TASK_FILE)
    with pytest.raises(ConfigError, match=text) as caught:
        load_task(source.replace("FILE", str(path)))
    assert caught.value.field == field


def jsonl(tmp_path: Path, *rows: Any) -> Task:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    (tmp_path / "r.py").write_text("def f(completions, **_): return [1.0] * len(completions)\n")
    return load_task(f"jsonl:{tmp_path / 'rows.jsonl'}", f"{tmp_path / 'r.py'}:f=2.5")


def test_jsonl_rows(tmp_path: Path) -> None:
    """Messages, texts and instruction columns; an output is for the reward functions and not shown to the model."""
    turn = {"role": "user", "content": "q"}
    task = jsonl(
        tmp_path, {"id": "a", "messages": [turn], "split": "train"}, {"prompt": "plain", "split": "train", "k": 1},
        {"prompt": [turn], "split": "held_out"}, {"instruction": "i", "input": "n", "output": "o", "split": "train"},
    )  # fmt: skip
    assert [prompt.prompt_id for prompt in task.train] == ["a", "2", "4"]
    assert task.train[1].text == "plain" and task.train[1].columns == {"k": 1}
    assert [message["role"] for message in task.train[2].messages] == ["system", "user"]
    assert task.train[2].columns["output"] == "o" and task.held_out[0].messages == (turn,)
    assert task.rewards[0].weight == 2.5


def test_jsonl_without_splits(tmp_path: Path) -> None:
    """About a tenth is held out, the same rows wherever the file is read."""
    rows = [{"id": f"r{at}", "prompt": f"p{at}"} for at in range(200)]
    task, again = jsonl(tmp_path, *rows), jsonl(tmp_path, *reversed(rows))
    assert 5 <= len(task.held_out) <= 40 and len(task.train) + len(task.held_out) == 200
    assert {each.prompt_id for each in task.held_out} == {each.prompt_id for each in again.held_out}
    assert len(jsonl(tmp_path, *rows[:2]).held_out) == 1


@pytest.mark.parametrize("row", [[1], {"id": "x"}, {"prompt": "p", "split": "test"}], ids=str)
def test_jsonl_rows_that_cannot_be(row: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be loaded"):
        jsonl(tmp_path, {"prompt": "a"}, row)


def test_reward_weights_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(**_): return []\n")
    with pytest.raises(ConfigError, match="weight 'x'"):
        load_task("jsonl:/none", f"{tmp_path / 'r.py'}:f=x")
    with pytest.raises(ConfigError, match="only a jsonl"):
        load_task("sort-words", f"{tmp_path / 'r.py'}:f")
