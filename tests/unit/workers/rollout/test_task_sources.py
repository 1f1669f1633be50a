"""Every kind of task source: what it gives, what its rewards say, and which setting an error names."""

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
from unison.workers.rollout.tasks import absolute_source, load_task


def totals(task: Task, prompt: Prompt, *texts: str) -> list[float]:
    scores = asyncio.run(score_group(task.rewards, prompt, texts, [(1,)] * len(texts)))
    return [score.total for score in scores]


def near_misses(name: str, answer: str) -> list[str]:
    """Wrong answers that a model gives on its way to the right one."""
    if name == "add-numbers":
        number = int(answer)
        return [str(number + 1), f"-{number + 1}", f"{number}1", f"It is {number}, I think", f"{number} {number}"]
    longer = [f"{answer} indeed", f"Sure! Here it is: {answer}", answer[:-1], "zzz"]
    return [" ".join(reversed(answer.split())), *longer] if name == "sort-words" else longer


@pytest.mark.parametrize("name", BUILTIN_TASKS)
def test_near_misses_of_built_in_tasks(name: str) -> None:
    """The right answer in other dress earns 1; a wrong one less than half, and never less than 0."""
    task = load_task(name)
    for prompt in (*task.train[:10], *task.held_out[:10]):
        answer = prompt.columns["answer"]
        assert totals(task, prompt, answer, f" {answer}.\n", answer.upper()) == [1.0] * 3
        assert all(0.0 <= total < 0.5 for total in totals(task, prompt, *near_misses(name, answer)))


@pytest.mark.parametrize("name", BUILTIN_TASKS)
def test_rewards_of_built_in_tasks_tell_wrong_answers_apart(name: str) -> None:
    """A group of wrong answers isn't all alike, else there is nothing to learn from at the beginning."""
    task = load_task(name)
    prompt = task.train[0]
    assert len(set(totals(task, prompt, *near_misses(name, prompt.columns["answer"])))) > 1


@pytest.mark.parametrize("name", ["sort-words", "last-word"])
def test_what_stands_around_the_answer_costs(name: str) -> None:
    """The more words besides the right ones, the less: there is a way from talking to answering."""
    task = load_task(name)
    answer = task.train[0].columns["answer"]
    found = totals(task, task.train[0], answer, f"{answer} indeed", f"{answer} is what I would say", "nothing of it")
    assert found == sorted(set(found), reverse=True) and found[-1] == 0.0


@pytest.mark.parametrize("name", BUILTIN_TASKS)
def test_prompts_of_built_in_tasks(name: str) -> None:
    """Every prompt is one user turn, named after its task, and states what the answer column says."""
    task = load_task(name)
    assert len(task.train) > len(task.held_out) >= 64
    for prompt in (*task.train, *task.held_out):
        (turn,) = prompt.messages
        assert prompt.prompt_id.startswith(f"{name}-") and turn["role"] == "user" and prompt.columns["answer"]
        if name != "add-numbers":
            assert all(word in turn["content"] for word in prompt.columns["answer"].split())


def test_options_of_built_in_tasks() -> None:
    """P50: options reach the task; the same ones give the same prompts."""
    options = '{"seed": 3, "num_words": 5}'
    task, again = load_task("sort-words", options=options), load_task("sort-words", options=options)
    assert task.train == again.train and len(task.train[0].columns["answer"].split()) == 5
    assert task.train != load_task("sort-words", options='{"num_words": 5}').train


@pytest.mark.parametrize("options", ["{", "seed=1", "'seed'"])
def test_options_that_are_no_json(options: str) -> None:
    """P50: the error is of task.options, and shows what was given."""
    with pytest.raises(ConfigError, match="must be a JSON object") as caught:
        load_task("sort-words", options=options)
    assert caught.value.field == "task.options" and repr(options) in str(caught.value)


@pytest.mark.parametrize("name", BUILTIN_TASKS)
def test_unknown_options_are_refused(name: str) -> None:
    """P50: a key that the task doesn't know is an error that names it."""
    with pytest.raises(ConfigError, match="'sed'"):
        load_task(name, options='{"sed": 1}')


TASK_FILE = """
from unison.workers.rollout import Prompt, Reward, Task
def reward(completions, **_): return [0.0] * len(completions)
def other(completions, **_): return [1.0] * len(completions)
def prompts(name, count): return [Prompt(f"{name}{at}", text=name) for at in range(count)]
ready = Task(prompts("a", 2), prompts("b", 1), [Reward(reward, 2.0), other])
class Own(Task):
    def __init__(self, size=1):
        super().__init__(prompts("c", size), prompts("d", 1), [reward])
def make(size=3): return Task(prompts("e", size), prompts("f", 1), [reward])
def nothing(): return None
def empty(): return Task([], prompts("g", 1), [reward])
def shared(): return Task(prompts("h", 2), prompts("h", 1), [reward])
def unrewarded(): return Task(prompts("i", 1), prompts("j", 1), [])
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.py"
    path.write_text(TASK_FILE)
    return path


def test_a_file_with_a_task(task_file: Path) -> None:
    """FILE.py:NAME of a Task is that Task, with its weights."""
    task = load_task(f"{task_file}:ready")
    assert type(task) is Task and [prompt.prompt_id for prompt in task.train] == ["a0", "a1"]
    assert [(each.label, each.weight) for each in task.rewards] == [("reward", 2.0), ("other", 1.0)]


@pytest.mark.parametrize(("name", "options", "count"), [("Own", "", 1), ("Own", '{"size": 4}', 4), ("make", "", 3),
                                                        ("make", '{"size": 4}', 4)])  # fmt: skip
def test_a_file_with_a_maker_of_tasks(task_file: Path, name: str, options: str, count: int) -> None:
    """A subclass and a function are called with the options."""
    task = load_task(f"{task_file}:{name}", options=options)
    assert isinstance(task, Task) and len(task.train) == count and (type(task) is not Task) == (name == "Own")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nothing", "gave a NoneType"), ("empty", "0 training"), ("shared", "no id may come twice"),
        ("unrewarded", "reward functions are"), ("missing", "has no missing"), ("", "a colon, and a name"),
    ],
)  # fmt: skip
def test_files_without_a_task(task_file: Path, name: str, text: str) -> None:
    """P50: the error names the setting, the source, and what is the matter with it."""
    with pytest.raises(ConfigError, match=text) as caught:
        load_task(f"{task_file}:{name}")
    assert caught.value.field == "task.source" and str(task_file) in str(caught.value)


def test_a_file_that_does_not_run(tmp_path: Path) -> None:
    """What it raises is in the error; once it is mended it is read anew."""
    path = tmp_path / "tasks.py"
    for content, text in (("def (", "SyntaxError"), ("import no_such_module_at_all", "no_such_module_at_all")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=text) as caught:
            load_task(f"{path}:ready")
        assert caught.value.field == "task.source"
    path.write_text(TASK_FILE)
    assert load_task(f"{path}:ready").train


def jsonl(folder: Path, *lines: Any, rewards: str = "f") -> Task:
    """A task of these rows; texts go into the file as they are."""
    path, file = folder / "rows.jsonl", folder / "r.py"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    file.write_text("def f(completions, **_): return [1.0] * len(completions)\ng = lambda **_: []\n")
    return load_task(f"jsonl:{path}", ",".join(f"{file}:{each}" for each in rewards.split(",")))


TRAIN = {"prompt": "t", "split": "train"}
HELD_OUT = {"prompt": "h", "split": "held_out"}
USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("row", "messages", "text", "columns"),
    [
        ({"messages": [USER], "answer": 3}, (USER,), "", {"answer": 3}),
        ({"prompt": [USER, USER]}, (USER, USER), "", {}),
        ({"prompt": "a text", "level": None}, (), "a text", {"level": None}),
        ({"instruction": "i", "input": "n"}, ({"role": "system", "content": "i"}, {"role": "user", "content": "n"}), "",
         {"instruction": "i", "input": "n"}),
        ({"input": "n", "output": "o"}, ({"role": "user", "content": "n"},), "", {"input": "n", "output": "o"}),
    ],
    ids=["messages", "prompt of messages", "prompt of text", "instruction", "output"],
)  # fmt: skip
def test_kinds_of_rows(
    tmp_path: Path, row: dict[str, Any], messages: tuple[dict[str, str], ...], text: str, columns: dict[str, Any]
) -> None:
    """S30: each row is a conversation or a text; what it holds besides is for the reward functions."""
    task = jsonl(tmp_path, row | {"id": "it", "split": "train"}, HELD_OUT)
    assert task.train == (Prompt("it", messages, text, columns),)


def test_rows_keep_their_order_and_split(tmp_path: Path) -> None:
    """S31: prompts are in the file's order within their split; without an id a row's number is its id."""
    task = jsonl(tmp_path, TRAIN, HELD_OUT, "", TRAIN | {"id": "own"}, HELD_OUT, TRAIN | {"id": 77})
    assert [prompt.prompt_id for prompt in task.train] == ["1", "own", "77"]
    assert [prompt.prompt_id for prompt in task.held_out] == ["2", "5"]


def test_a_row_stays_in_its_split_when_others_come(tmp_path: Path) -> None:
    """P28: without splits a row's id alone decides, so that a longer file trains on no prompt held out before."""
    rows = [{"id": f"r{at}", "prompt": "x"} for at in range(120)]
    before = {prompt.prompt_id for prompt in jsonl(tmp_path, *rows[:60]).held_out}
    after = {prompt.prompt_id for prompt in jsonl(tmp_path, *rows).held_out}
    assert before and before == after & {row["id"] for row in rows[:60]}


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["{"], "JSONDecodeError"), (["[1]"], "line 1 of .* isn't an object"), ([TRAIN], "1 training and 0 held-out"),
        ([{"prompt": "x"}], "both splits need at least one"), ([], "0 training"),
        ([TRAIN, HELD_OUT, {"answer": 1}], "row 3 has neither messages"), ([{"prompt": []}], "row 1 has neither"),
        ([{"output": "o"}], "row 1 has neither"), ([TRAIN, HELD_OUT | {"split": "test"}], "has the split 'test'"),
        ([TRAIN, {"prompt": "x"}], "has the split None"), ([TRAIN | {"id": "a"}, HELD_OUT | {"id": "a"}], "no id may"),
        ([TRAIN | {"id": 2}, HELD_OUT], "no id may come twice"), ([{"messages": ["hi"]}], "can't be loaded"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be(tmp_path: Path, lines: list[Any], text: str) -> None:
    """P50: the file is refused as a whole, with the row and the reason."""
    with pytest.raises(ConfigError, match=text) as caught:
        jsonl(tmp_path, *lines)
    assert caught.value.field == "task.source" and "rows.jsonl" in str(caught.value)


def test_several_weighted_rewards(tmp_path: Path) -> None:
    """FILE.py:NAME=WEIGHT, by comma; without a weight it is 1."""
    task = jsonl(tmp_path, TRAIN, HELD_OUT, rewards="f=0.25,g")
    assert [(each.label, each.weight) for each in task.rewards] == [("f", 0.25), ("<lambda>", 1.0)]


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        ("f=", None), ("f=heavy", "weight 'heavy'"), ("missing", "has no missing"), ("f,missing", "has no missing"),
        ("f,f", "names must differ"),
    ],
)  # fmt: skip
def test_rewards_that_cannot_be(tmp_path: Path, rewards: str, text: str | None) -> None:
    """P50: the error is of the setting that is wrong; an empty weight is none given."""
    if text is None:
        assert jsonl(tmp_path, TRAIN, HELD_OUT, rewards=rewards).rewards[0].weight == 1.0
        return
    with pytest.raises(ConfigError, match=text) as caught:
        jsonl(tmp_path, TRAIN, HELD_OUT, rewards=rewards)
    assert caught.value.field == ("task.source" if "differ" in text else "task.rewards")


@pytest.mark.parametrize("rewards", ["", " , ", "/none.py:f", "r.py"])
def test_a_jsonl_source_needs_rewards(rewards: str) -> None:
    """P50: none, or ones in no file, are an error of task.rewards."""
    with pytest.raises(ConfigError) as caught:
        load_task("jsonl:/none.jsonl", rewards)
    assert caught.value.field == "task.rewards"


@pytest.mark.parametrize("source", ["", "sortwords", "SORT-WORDS", "x.py", ":", "http://x"])
def test_unknown_sources(source: str) -> None:
    """P50: what is no source is an error of task.source, never an empty task."""
    with pytest.raises(ConfigError) as caught:
        load_task(source)
    assert caught.value.field == "task.source" and repr(source) in str(caught.value)


@pytest.mark.slow
def test_reasoning_gym_twice() -> None:
    """P45: every process has the same rows and splits, and no question is in both; right answers earn 1."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    shape = {"seed": 5, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    options = json.dumps(shape | {"num_train": 180, "num_held_out": 20})
    task, again = (load_task("reasoning_gym:basic_arithmetic", options=options) for _ in range(2))
    assert task.train == again.train and task.held_out == again.held_out
    questions = [{prompt.messages[0]["content"] for prompt in split} for split in (task.train, task.held_out)]
    assert not questions[0] & questions[1] and len(questions[0]) == len(task.train)
    assert len(task.held_out) == 20 and len(task.train) < 180, "the data set repeats questions; the test needs it to"
    dataset = reasoning_gym.create_dataset("basic_arithmetic", size=200, **shape)
    for prompt in (*task.train[:4], *task.held_out[:4]):
        row = dataset[prompt.columns["row"]]
        assert row["question"] in prompt.messages[0]["content"]
        right, wrong = totals(task, prompt, f" {row['answer']}\n", f"{row['answer']}1")
        assert right == 1.0 and wrong < 1.0


@pytest.mark.slow
def test_reasoning_gym_options_that_cannot_be() -> None:
    """P50: an option that the data set doesn't know is an error of the source."""
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match="no_such_option") as caught:
        load_task("reasoning_gym:basic_arithmetic", options='{"no_such_option": 1}')
    assert caught.value.field == "task.source"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("tasks/mine.py:letters", "{cwd}/tasks/mine.py:letters"),
        ("jsonl:rows.jsonl", "jsonl:{cwd}/rows.jsonl"),
        ("/a/mine.py:letters=0.5", "/a/mine.py:letters=0.5"),
        ("sort-words", "sort-words"),
        ("reasoning_gym:leg_counting", "reasoning_gym:leg_counting"),
    ],
)
def test_sources_mean_the_same_from_everywhere(
    source: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run finds its task, wherever it is started."""
    monkeypatch.chdir(tmp_path)
    assert absolute_source(source) == wanted.format(cwd=tmp_path)


def test_ids_are_texts() -> None:
    """The ledger and the wire know no others; said when the task is made, not when its first order is sent."""
    with pytest.raises(ValueError, match="1000, a int"):
        Task([Prompt(1000, text="a")], [Prompt("h", text="b")], [len])  # type: ignore[arg-type]


def test_one_function_alone() -> None:
    """TRL takes a function where it takes a list of them."""
    assert [each.label for each in Task([Prompt("a", text="a")], [Prompt("h", text="b")], len).rewards] == ["len"]
