"""TrainPlan: what a run will take and drop, worked out without loading anything; shown by `bin/train --dry-run`.

Owns: the arithmetic, and the sentences. Called by the command line.
"""

from __future__ import annotations

import json

import click

from ..cli import without_secrets
from ..plan import MemoryPlan
from ..rollout.tasks import load_task
from .config import TrainConfig

FLOAT32_COPIES = {"masters": 1, "moments": 2, "gradient": 1}
"""Vectors of the model's size that the trainer holds in float32."""


def memory(config: TrainConfig) -> dict[str, int]:
    """Bytes by purpose, of all processes."""
    plan = MemoryPlan.of(config.serve)
    found = {f"{name}_bytes": 4 * plan.parameters * count for name, count in FLOAT32_COPIES.items()}
    found["reference_bytes"] = plan.buffer_bytes if config.algorithm.kl_coef else 0
    found["kept_version_bytes"] = plan.buffer_bytes if config.checkpoint.keep_interval else 0
    rings = 2 * config.rollout.num_workers * (config.rollout.ring_mib << 20)
    return vars(plan) | found | {"ring_bytes": rings}


def sentences(config: TrainConfig) -> list[str]:
    """Staleness, and what will not be trained."""
    rollout, lines = config.rollout, []
    if config.max_lag == 0:
        lines.append("every sample is trained by the version that made it: lag 0")
    else:
        lines.append(f"samples are at most {config.max_lag} versions old when they are trained; older ones are dropped")
    lines.append({
        "train": "completions cut off at rollout.max_tokens are trained as they are",
        "mask": "completions cut off at rollout.max_tokens count in the group's mean and are masked out of the loss",
        "drop": "completions cut off at rollout.max_tokens are left out",
    }[rollout.truncated])  # fmt: skip
    lines.append({
        "keep": "groups with equal rewards stay in the batch, with advantage 0",
        "drop": "groups with equal rewards are left out of the batch",
        "refill": f"groups with equal rewards are replaced, at most {rollout.max_refill_groups} per step",
    }[rollout.zero_variance])  # fmt: skip
    interval, keep = config.checkpoint.keep_interval, config.checkpoint.keep
    lines.append(
        f"samples of the first version and of the newest {keep} checkpoints can be verified afterwards"
        if not interval else "every sample can be verified afterwards" if interval == 1
        else f"samples of the versions of every {interval}th step can be verified afterwards"
    )  # fmt: skip
    return lines


def print_plan(config: TrainConfig) -> None:
    """The resolved configuration as JSON, secrets left out, and the plan. The task is loaded, as a check of it."""
    task = load_task(config.task.source, config.task.rewards, config.task.options)
    values = config.to_dict()
    values["serve"] = without_secrets(values["serve"])
    click.echo(json.dumps({
        "configuration": values, "memory": memory(config),
        "task": {"train": len(task.train), "held_out": len(task.held_out),
                 "rewards": {reward.label: reward.weight for reward in task.rewards}},
        "samples_per_step": config.rollout.groups_per_step * config.rollout.group_size, "plan": sentences(config),
    }, indent=2))  # fmt: skip
