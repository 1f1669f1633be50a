"""bin/train from start to end on the tiny model: what holds of every step, of resumed runs, and of the ledger."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from harness.training import (
    FAST,
    TrainProcess,
    assert_accounted,
    children_gone,
    digests,
    query,
    train,
    training,
    write_task,
)
from unison.ipc.arena.publisher import WeightPublisher
from unison.ipc.client import Client
from unison.ipc.types import SamplingParams

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainProcess:
    """A run of eight steps in synchronous mode, uninterrupted."""
    folder = tmp_path_factory.mktemp("finished")
    task = write_task(folder / "letters.py")
    return train(folder / "r", chat_model, task, *FAST, "--steps", "8", has_curves=True)


def test_it_learns(finished: TrainProcess) -> None:
    """The reward of the samples rises: generation, rewards, gradient and publication belong together."""
    rewards = [row["reward"] for row in finished.steps()]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])


def test_versions_are_steps_and_lag_is_zero(finished: TrainProcess) -> None:
    """S26: in synchronous mode ordinal, step and the samples' versions go together, and no sample mixes versions."""
    assert [row["version"] for row in finished.steps()] == list(range(1, 9))
    assert {row["lag_max"] for row in finished.steps()} == {0.0}
    assert query(finished.run_dir, "SELECT step, base_version, version FROM steps ORDER BY step") == [
        (step, step - 1, step) for step in range(1, 9)
    ]
    rows = query(finished.run_dir, "SELECT o.step, s.versions, length(s.tokens) / 4 FROM samples s JOIN orders o USING "
                 "(order_id) WHERE o.state = 'trained'")  # fmt: skip
    assert len(rows) == 8 * 16
    for step, versions, length in rows:
        assert json.loads(versions) == [[step - 1, 0, length]]


def test_fresh_ratios_are_exactly_one(finished: TrainProcess) -> None:
    """P19, S35: engine's and trainer's log-probs are the same bits: ratio 1, canary 0, on every token of every step."""
    for row in finished.steps():
        assert (row["ratio_max_deviation"], row["canary_max_difference"], row["kl"]) == (0.0, 0.0, 0.0)


def test_every_prompt_is_accounted_for(finished: TrainProcess) -> None:
    """P28, S28: each prompt ends in one state, and each once per epoch in the order that the seed gives."""
    counts = assert_accounted(finished.run_dir)
    assert counts == {"trained": 32, "evaluated": 8}
    indices = [index for (index,) in query(finished.run_dir, "SELECT prompt_index FROM orders WHERE split = 'train'")]
    assert len(set(indices)) == 32


def test_evaluations_are_pinned(finished: TrainProcess) -> None:
    """P45: an evaluation's samples come from the one version of its step."""
    assert query(finished.run_dir, "SELECT step, version, num_prompts FROM evaluations") == [(0, 0, 4), (8, 8, 4)]
    rows = query(finished.run_dir, "SELECT o.step, s.versions FROM samples s JOIN orders o USING (order_id) WHERE "
                 "o.state = 'evaluated'")  # fmt: skip
    assert all(version == step for step, spans in rows for version, _, _ in json.loads(spans))


def test_the_checkpoint_is_a_model_directory(finished: TrainProcess) -> None:
    """transformers loads it, and its weights are those of the last version."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from unison.engine.models.layout import WeightLayout
    from unison.engine.models.loader import load_into
    from unison.engine.models.spec import ModelSpec

    directory = sorted((finished.run_dir / "checkpoints").iterdir())[-1]
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert AutoTokenizer.from_pretrained(directory).chat_template
    assert sum(parameter.numel() for parameter in loaded.parameters()) > 0
    layout = WeightLayout(ModelSpec.from_dir(directory), torch.bfloat16)
    views = layout.views(layout.allocate())
    load_into(directory, layout, views)
    assert layout.manifest(views).digest == digests(finished.run_dir)[8]


def test_a_resumed_run_equals_the_uninterrupted_one(finished: TrainProcess, chat_model: Path, tmp_path: Path) -> None:
    """P28: Ctrl-C leaves a checkpoint; going on from it skips and repeats nothing, and gives the same bits."""
    task = write_task(tmp_path / "letters.py")
    with training(tmp_path / "r", chat_model, task, *FAST, "--steps", "8") as process:
        process.wait_step(2)
        assert process.interrupt() == 75, process.story
        stopped_at = process.steps()[-1]["step"]
        children_gone(process)
    assert 2 <= stopped_at < 8
    assert "--resume" in process.output
    train(tmp_path / "r", chat_model, "", "--resume")
    assert digests(tmp_path / "r") == digests(finished.run_dir)
    consumed = "SELECT order_id, prompt_id, step, state, seed FROM orders WHERE split = 'train' ORDER BY order_id"
    assert query(tmp_path / "r", consumed) == query(finished.run_dir, consumed)
    assert query(tmp_path / "r", "SELECT step, version FROM steps") == query(
        finished.run_dir, "SELECT step, version FROM steps"
    )
    assert_accounted(tmp_path / "r")


def test_seeds(finished: TrainProcess, chat_model: Path, tmp_path: Path) -> None:
    """P40: the same seed gives the same run, another seed another one; members of a group differ."""
    task = write_task(tmp_path / "letters.py")
    again = train(tmp_path / "a", chat_model, task, *FAST, "--steps", "2")
    other = train(tmp_path / "b", chat_model, task, *FAST, "--steps", "2", "--seed", "1")
    whole = digests(finished.run_dir)
    assert digests(again.run_dir) == {step: whole[step] for step in range(3)}
    assert digests(other.run_dir)[1] != whole[1]
    groups: dict[int, list[bytes]] = {}
    for order, tokens in query(again.run_dir, "SELECT order_id, tokens FROM samples WHERE order_id < 1000"):
        groups.setdefault(order, []).append(tokens)
    assert all(len(set(samples)) > 1 for samples in groups.values())


def test_asynchronous_mode_bounds_the_lag(chat_model: Path, task: str, tmp_path: Path) -> None:
    """V6: generation runs ahead, and nothing older than max_staleness is trained; the canary compares what it can."""
    process = train(
        tmp_path / "r", chat_model, task, *FAST, "--steps", "10", "--mode", "async", "--set", "rollout.max_staleness=2",
        "--set", "algorithm.correction=tis",
    )  # fmt: skip
    lags = [row["lag_max"] for row in process.steps()]
    assert max(lags) <= 2.0 and max(lags) > 0.0
    assert all(row["canary_max_difference"] == 0.0 for row in process.steps() if "canary_max_difference" in row)
    assert any("canary_max_difference" in row for row in process.steps())
    counts = assert_accounted(process.run_dir)
    assert counts["trained"] == 40
    for step, base, spans in query(
        process.run_dir, "SELECT t.step, t.base_version, s.versions FROM samples s JOIN orders o USING (order_id) JOIN "
        "steps t ON t.step = o.step WHERE o.state = 'trained'",
    ):  # fmt: skip
        assert all(0 <= base - version <= 2 for version, _, _ in json.loads(spans)), step


@pytest.mark.parametrize(
    ("algorithm", "temperature", "kl_in"),
    [("gspo", "0.7", "loss"), ("rloo", "1.0", "reward"), ("cispo", "1.3", "loss")],
)
def test_every_objective_runs(
    algorithm: str, temperature: str, kl_in: str, chat_model: Path, task: str, tmp_path: Path
) -> None:
    """P19: each objective makes steps, with a KL term in reward or loss; ratios are exactly 1 at every temperature."""
    process = train(
        tmp_path / "r", chat_model, task, *FAST, "--steps", "2", "--algorithm", algorithm, "--temperature", temperature,
        "--set", "algorithm.kl_coef=0.01", "--set", f"algorithm.kl_in={kl_in}",
    )  # fmt: skip
    first = process.steps()[0]
    assert (first["ratio_max_deviation"], first["canary_max_difference"]) == (0.0, 0.0)
    assert [row["version"] for row in process.steps()] == [1, 2]


def test_several_steps_on_one_batch(chat_model: Path, task: str, tmp_path: Path) -> None:
    """S37: a batch that is used again isn't fresh: its ratios leave 1, and its prompts end once."""
    process = train(tmp_path / "r", chat_model, task, *FAST, "--steps", "4", "--set", "algorithm.num_iterations=2")
    deviations = [row["ratio_max_deviation"] for row in process.steps()]
    assert deviations[0] == deviations[2] == 0.0
    assert min(deviations[1], deviations[3]) > 0.0
    states = query(process.run_dir, "SELECT step, count(*) FROM orders WHERE state = 'trained' GROUP BY step")
    assert states == [(1, 4), (3, 4)]


def test_equal_rewards_make_no_step(chat_model: Path, tmp_path: Path) -> None:
    """All-equal rewards move nothing: no step, no version, no NaN; the run says so and ends."""
    task = write_task(tmp_path / "flat.py", "flat", "def flat(completions, **_): return [0.5] * len(completions)\n")
    with training(tmp_path / "r", chat_model, task, *FAST, "--set", "max_dry_batches=3") as process:
        assert process.wait_end() == 70
    assert "equal rewards" in process.output
    assert query(tmp_path / "r", "SELECT count(*) FROM steps") == [(0,)]
    assert query(tmp_path / "r", "SELECT max(ordinal) FROM versions") == [(0,)]
    assert query(tmp_path / "r", "SELECT DISTINCT state, reason FROM orders WHERE split = 'train'") == [
        ("dropped", "no_signal")
    ]


def test_a_task_that_is_learnt_ends_the_run(chat_model: Path, tmp_path: Path) -> None:
    """When every group's rewards have become equal the run ends well before its last step, with a checkpoint."""
    extra = "import pathlib\ndef done(completions, **_):\n    n = pathlib.Path(__file__).with_suffix('.n')\n"
    extra += "    count = len(n.read_text()) if n.exists() else 0\n    n.write_text('x' * (count + 1))\n"
    extra += "    return vowels(completions) if count < 20 else [1.0] * len(completions)\n"
    task = write_task(tmp_path / "done.py", "done", extra)
    process = train(tmp_path / "r", chat_model, task, *FAST, "--steps", "1000", "--set", "max_dry_batches=3")
    assert "nothing left to learn" in process.output and 0 < len(process.steps()) <= 5
    assert (tmp_path / "r" / "checkpoints").exists() and assert_accounted(tmp_path / "r")["dropped"] >= 12


def test_dynamic_sampling_replaces_flat_groups(chat_model: Path, tmp_path: Path) -> None:
    """P28: groups without signal are replaced within the budget, recorded, and compared with what was kept."""
    extra = (
        "def some(completions, at, **_):\n"
        "    return [0.0 if at[0] % 2 else float(i) for i in range(len(completions))]\n"
    )
    task = write_task(tmp_path / "half.py", "some", extra)
    process = train(tmp_path / "r", chat_model, task, *FAST, "--steps", "3", "--set", "rollout.zero_variance=refill")
    assert sum(row["num_replaced"] for row in process.steps()) > 0
    assert any("dropped_minus_kept_reward" in row for row in process.steps())
    flat = query(process.run_dir, "SELECT DISTINCT prompt_index % 2 FROM orders WHERE reason = 'zero_variance'")
    assert flat == [(1,)]
    assert query(process.run_dir, "SELECT DISTINCT prompt_index % 2 FROM orders WHERE state = 'trained'") == [(0,)]


def test_the_policy_is_served_while_it_is_trained(chat_model: Path, task: str, tmp_path: Path) -> None:
    """HTTP and the client library answer during training, under a version of the run."""
    with training(tmp_path / "r", chat_model, task, *FAST, "--steps", "100000", "--serve-port", "0") as process:
        process.wait_ready()
        process.wait_step(1)
        body = {"model": chat_model.name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        request = urllib.request.Request(
            f"{process.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.loads(reply.read())["usage"]["completion_tokens"] > 0
        with Client.connect(tmp_path / "r") as client:
            completion = client.generate([5, 6], SamplingParams(max_tokens=4, ignore_eos=True)).completions[0]
        assert completion.versions[0].version >= 1
        assert process.interrupt() == 75, process.story


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_foreign_version_ends_the_run(mode: str, chat_model: Path, task: str, tmp_path: Path) -> None:
    """V6: where someone else publishes into the run, what is live isn't the trainer's own: it ends, and says so."""
    with training(tmp_path / "r", chat_model, task, *FAST, "--steps", "100000", "--mode", mode) as process:
        process.wait_step(2)
        with Client.connect(tmp_path / "r", role="trainer") as client, WeightPublisher(client) as publisher:
            with publisher.update() as update:
                for tensor in update.tensors.values():
                    tensor.fill_(0.5)
        assert process.wait_end() == 70
    assert "someone else publishes" in process.output or "isn't installed" in process.output


def test_jsonl_with_reward_functions(chat_model: Path, tmp_path: Path) -> None:
    """Rows with instruction, input and output become turns; two functions are weighted; columns reach them (S30)."""
    rows = [
        {"id": f"q{at}", "instruction": "be brief", "input": f"question {at}", "output": "aaa"} for at in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def vowels(prompts, completions, output, **_):\n"
        "    assert [m['role'] for m in prompts[0]] == ['system', 'user'] and output[0] == 'aaa'\n"
        "    return [sum(c in 'aeiou' for c in each[0]['content']) / 8 for each in completions]\n"
        "async def short(completions, **_):\n"
        "    return [-len(each[0]['content']) / 8 for each in completions]\n"
    )
    process = train(
        tmp_path / "r", chat_model, f"jsonl:{tmp_path}/rows.jsonl", *FAST, "--steps", "2",
        "--set", f"task.rewards={tmp_path}/rewards.py:vowels,{tmp_path}/rewards.py:short=0.5",
    )  # fmt: skip
    parts = [json.loads(text) for (text,) in query(process.run_dir, "SELECT rewards FROM samples")]
    assert all(set(part) == {"vowels", "short"} for part in parts)
    totals = query(process.run_dir, "SELECT reward FROM samples")
    assert [total for (total,) in totals] == [part["vowels"] + 0.5 * part["short"] for part in parts]


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unison.workers.trainer.cli", *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_run_directory_is_used_once(finished: TrainProcess, chat_model: Path, tmp_path: Path) -> None:
    """P39, P50: a directory with a run is refused without --resume; --resume without a run too."""
    taken = run_cli("--model", str(chat_model), "--run-dir", str(finished.run_dir))
    assert taken.returncode == 78 and "--resume" in taken.stderr
    empty = run_cli("--model", str(chat_model), "--run-dir", str(tmp_path / "none"), "--resume")
    assert empty.returncode == 78 and "no run" in empty.stderr


def test_a_finished_run_goes_on_with_more_steps(finished: TrainProcess, chat_model: Path, tmp_path: Path) -> None:
    """Steps are counted in all; ordinals go on."""
    shutil.copytree(finished.run_dir, tmp_path / "r")
    process = train(tmp_path / "r", chat_model, "", "--resume", "--steps", "10")
    assert [row["version"] for row in process.steps()] == list(range(1, 11))
    assert assert_accounted(tmp_path / "r")["trained"] == 40


def test_samples_and_curves(finished: TrainProcess) -> None:
    """The ledger can be browsed, and the curves are a picture."""
    shown = run_cli("samples", str(finished.run_dir), "--step", "3", "--limit", "5")
    assert shown.returncode == 0 and "32 trained" in shown.stdout
    held_out = run_cli("samples", str(finished.run_dir), "--state", "evaluated", "--limit", "1")
    assert re.search(r"\b10995116277\d\d\b", held_out.stdout), "an id can be read whole, and given to --order"
    assert (finished.run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
