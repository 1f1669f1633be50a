"""The naive GRPO loop that one writes first: transformers' `generate`, a padded forward with autograd, AdamW.

Owns: the loop. float32 weights under bfloat16 autocast, like TRL's run beside it; one optimizer step per batch, so the
importance ratios are 1 and the loss is advantage times log-prob. Called by `training.py` in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..rollout.prompts import PromptRenderer
from ..rollout.rewards import score_group
from ..rollout.task import Task
from ..rollout.tasks import load_task


def train_plainly(arguments: dict[str, Any]) -> None:
    """One run: `steps` steps of `groups` prompts with `group_size` samples each; writes the model and seconds.json."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(arguments["threads"])
    torch.manual_seed(arguments["seed"])
    tokenizer = AutoTokenizer.from_pretrained(arguments["model"])
    model: Any = AutoModelForCausalLM.from_pretrained(arguments["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments["learning_rate"], weight_decay=0.0)
    task, renderer = load_task(arguments["task"]), PromptRenderer(tokenizer)
    draw, seconds = random.Random(arguments["seed"]), []
    for _ in range(arguments["steps"]):
        started = perf_counter()
        chosen = draw.sample(range(len(task.train)), arguments["groups"])
        ids, mask, completions = _generate(model, renderer, task, chosen, arguments)
        advantages = _advantages(renderer, task, chosen, completions, arguments["group_size"])
        loss = _loss(model, ids, mask, completions, advantages)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(perf_counter() - started)
    model.save_pretrained(arguments["out"])
    tokenizer.save_pretrained(arguments["out"])
    Path(arguments["out"], "seconds.json").write_text(json.dumps(seconds))


@torch.no_grad()
def _generate(
    model: Any, renderer: PromptRenderer, task: Task, chosen: list[int], arguments: dict[str, Any]
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Sequences padded on the left (prompt) and right, the mask of what is real, and each completion's tokens.

    Shapes: both tensors [groups * group_size, longest prompt + longest completion].
    """
    prompts = [list(renderer.encode(task.train[at])) for at in chosen]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.autocast("cpu", torch.bfloat16):
        sequences = model.generate(
            ids, attention_mask=mask, max_new_tokens=arguments["max_tokens"], do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, num_return_sequences=arguments["group_size"], pad_token_id=0,
        )  # fmt: skip
    eos = model.generation_config.eos_token_id
    stops = set(eos if isinstance(eos, list) else [eos])
    completions = []
    for row in sequences[:, longest:].tolist():
        length = next((at + 1 for at, token in enumerate(row) if token in stops), len(row))
        completions.append(row[:length])
    whole = torch.zeros_like(sequences)
    whole[:, :longest] = mask.repeat_interleave(arguments["group_size"], 0)
    for at, completion in enumerate(completions):
        whole[at, longest : longest + len(completion)] = 1
    return sequences, whole, completions


def _advantages(
    renderer: PromptRenderer, task: Task, chosen: list[int], completions: list[list[int]], group_size: int
) -> Tensor:
    """Reward minus the group's mean, over its standard deviation. Shape [groups * group_size]."""
    found = []
    for place, at in enumerate(chosen):
        group = completions[place * group_size : (place + 1) * group_size]
        scores = asyncio.run(score_group(task.rewards, task.train[at], [renderer.decode(ids) for ids in group], group))
        rewards = torch.tensor([score.total for score in scores])
        found.append((rewards - rewards.mean()) / (rewards.std() + 1e-4))
    return torch.cat(found)


def _loss(model: Any, ids: Tensor, mask: Tensor, completions: list[list[int]], advantages: Tensor) -> Tensor:
    """Minus advantage times log-prob, mean over each completion's tokens, then over completions."""
    start = ids.shape[1] - max(map(len, completions))  # generate ends with the longest completion
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, start - 1 : -1]
    logprobs = logits.float().log_softmax(-1).gather(2, ids[:, start:, None]).squeeze(2)
    is_token = mask[:, start:].to(logprobs.dtype)
    per_completion = (logprobs * is_token).sum(1) / is_token.sum(1)
    return -(advantages * per_completion).mean()


if __name__ == "__main__":
    train_plainly(json.loads(sys.argv[1]))
