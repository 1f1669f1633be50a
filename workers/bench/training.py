"""Training beside TRL's GRPOTrainer and a plain loop: the same model, task, batch, learning rate and threads, one after
the other.

Samples trained per second come from each one's own steps, the first left out; held-out rewards after equal samples from
this engine's greedy completions of each result. Each runs in a process of its own, once per seed: after a few steps
rewards differ more between seeds than between trainers, so one seed says nothing about them.

Owns: the runs. Called by `bin/bench train`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from ...engine.config import CacheConfig, EngineConfig
from ...engine.engine import Engine
from ...ipc.errors import ProcessFailedError
from ...ipc.types import SamplingParams
from ..rollout.prompts import PromptRenderer
from ..rollout.rewards import score_group
from ..rollout.task import Task
from ..rollout.tasks import load_task
from ..trainer.checkpoint import checkpoints
from ..trainer.metrics import read_metrics
from .training_updates import measure_generation_during_updates

GROUPS, GROUP_SIZE, MAX_TOKENS, LEARNING_RATE = 8, 8, 24, 2e-5
NUM_HELD_OUT = 64
Rows = dict[str, dict[str, float]]


def measure_training(model: Path, dtype: str, task_name: str, steps: int, threads: int, seeds: int) -> Rows:
    """Each trainer for `steps` steps of 64 samples, with each of the seeds from 0 on."""
    task = load_task(task_name)
    rows = {"before": {"held-out reward": held_out_reward(model, dtype, task)}}
    shared: dict[str, Any] = {
        "model": str(model), "dtype": dtype, "task": task_name, "steps": steps, "threads": threads, "groups": GROUPS,
        "group_size": GROUP_SIZE, "max_tokens": MAX_TOKENS, "learning_rate": LEARNING_RATE,
    }  # fmt: skip
    for name, run in (("unison", _unison), ("trl", _trl), ("plain loop", _plain)):
        seconds, rewards = [], []
        for seed in range(seeds):
            with tempfile.TemporaryDirectory(prefix="unison-bench-") as directory:
                step_s, result = run(shared | {"seed": seed, "out": str(Path(directory) / "out")})
                seconds += step_s[1:]
                rewards.append(held_out_reward(result, dtype, task))
        rows[name] = {"s per step": fmean(seconds), "samples/s": GROUPS * GROUP_SIZE / fmean(seconds),
                      "held-out reward": fmean(rewards), "lowest": min(rewards), "highest": max(rewards)}  # fmt: skip
    rows["async, while a version is published"] = measure_generation_during_updates(model, dtype, 4 * steps)
    ours_per_s = rows["unison"]["samples/s"]
    rows["ratio"] = {
        f"samples/s, unison / {name}": ours_per_s / rows[name]["samples/s"] for name in ("trl", "plain loop")
    }
    return rows


def held_out_reward(model: Path, dtype: str, task: Task) -> float:
    """Mean reward of greedy completions of the first held-out prompts."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    renderer = PromptRenderer(AutoTokenizer.from_pretrained(model))
    engine = Engine.from_pretrained(model, EngineConfig(dtype=dtype, cache=CacheConfig(num_tokens=32768)))
    prompts = task.held_out[:NUM_HELD_OUT]
    outputs = engine.run_batch(
        [list(renderer.encode(prompt)) for prompt in prompts], SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    )
    rewards = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = output.completions[0].token_ids
        (score,) = asyncio.run(score_group(task.rewards, prompt, [renderer.decode(ids)], [ids]))
        rewards.append(score.total)
    return fmean(rewards)


def _unison(arguments: dict[str, Any]) -> tuple[list[float], Path]:
    """Seconds of each step, and where the model is."""
    run_dir = Path(arguments["out"])
    _run([
        "unison.workers.trainer.cli", "--model", arguments["model"], "--dtype", arguments["dtype"],
        "--task", arguments["task"], "--steps", str(arguments["steps"]), "--seed", str(arguments["seed"]),
        "--groups-per-step", str(GROUPS), "--group-size", str(GROUP_SIZE), "--max-tokens", str(MAX_TOKENS),
        "--learning-rate", str(LEARNING_RATE), "--run-dir", str(run_dir), "--set", "evaluation.interval_steps=0",
        "--set", "checkpoint.interval_steps=0", "--set", "task.num_eval_prompts=1",
    ])  # fmt: skip
    rows = [row for row in read_metrics(run_dir) if row["kind"] == "step"]
    return [row["rollout_s"] + row["train_s"] + row["publish_s"] for row in rows], checkpoints(run_dir)[-1]


def _trl(arguments: dict[str, Any]) -> tuple[list[float], Path]:
    return _elsewhere("training", arguments)


def _plain(arguments: dict[str, Any]) -> tuple[list[float], Path]:
    return _elsewhere("plain_training", arguments)


def _elsewhere(module: str, arguments: dict[str, Any]) -> tuple[list[float], Path]:
    """The same of a trainer that a module beside this one runs, and that writes its model."""
    _run([f"unison.workers.bench.{module}", json.dumps(arguments)])
    out = Path(arguments["out"])
    return json.loads((out / "seconds.json").read_text()), out


def _run(arguments: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=os.environ,
        check=False,
    )  # fmt: skip
    if ended.returncode:
        raise ProcessFailedError(f"{arguments[0]} ended with {ended.returncode}:\n{ended.stderr[-4000:]}")


def train_with_trl(arguments: dict[str, Any]) -> None:
    """One TRL run, as its documentation sets it up on a CPU: bfloat16 autocast over float32 weights."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(arguments["threads"])
    task = load_task(arguments["task"])
    rows = [{"prompt": list(prompt.messages), **prompt.columns} for prompt in task.train]
    config = GRPOConfig(
        output_dir=arguments["out"], use_cpu=True, bf16=True, per_device_train_batch_size=GROUPS * GROUP_SIZE,
        num_generations=GROUP_SIZE, max_completion_length=MAX_TOKENS, learning_rate=LEARNING_RATE, beta=0.0,
        loss_type="grpo", max_steps=arguments["steps"], lr_scheduler_type="constant", report_to="none",
        save_strategy="no", logging_steps=1, temperature=1.0, gradient_checkpointing=False, seed=arguments["seed"],
    )  # fmt: skip
    times = [perf_counter()]

    class Clock(TrainerCallback):
        """Notes when each step has ended."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Called by the trainer."""
            times.append(perf_counter())

    trainer = GRPOTrainer(
        model=arguments["model"], args=config, train_dataset=Dataset.from_list(rows),
        reward_funcs=[reward.function for reward in task.rewards], callbacks=[Clock()],
        processing_class=AutoTokenizer.from_pretrained(arguments["model"]),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(arguments["out"])
    seconds = [after - before for before, after in zip(times, times[1:], strict=False)]
    Path(arguments["out"], "seconds.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    train_with_trl(json.loads(sys.argv[1]))
