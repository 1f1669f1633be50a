"""Surroundings: what a sample came from and went into: the task's prompt, the tokenizer, the reward functions.

Owns: the task, the tokenizer and the scorer's process of one run; what can't be had is said once per sample and counts
as unchecked, never as a difference. Called by the verifier; usable as a context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...ipc.errors import RewardError, UnisonError
from ...ipc.types import Completion, FinishReason
from ..rollout.prompts import PromptRenderer
from ..rollout.records import RawRollout, RewardScore
from ..rollout.scorer import Scorer
from ..rollout.task import Task
from ..rollout.tasks import load_task
from ..trainer.config import TrainConfig
from ..trainer.stored import StoredSample
from .case import Case
from .comparison import compare_prompt, compare_rewards, compare_text
from .verdict import Findings


class Surroundings:
    """Life: built → any number of `look` → closed. One thread; `close` ends the scorer's process."""

    def __init__(self, with_prompts: bool = True, with_rewards: bool = True) -> None:
        """`with_prompts` False loads no task; `with_rewards` False calls no reward function."""
        self._with_prompts = with_prompts
        self._with_rewards = with_rewards and with_prompts
        self._tasks: dict[tuple[str, str, str], Task | str] = {}
        self._renderers: dict[tuple[str, str], PromptRenderer | str] = {}
        self._scorers: dict[tuple[str, str, str], Scorer] = {}
        self._runner = asyncio.Runner()

    def __enter__(self) -> Surroundings:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what was started."""
        try:
            for scorer in self._scorers.values():
                self._runner.run(scorer.close())
        finally:
            self._runner.close()

    def look(self, case: Case, findings: Mapping[int, Findings]) -> None:
        """Compare prompt, text and rewards of every sample of a case; `findings` by sample index."""
        if case.origin is None:
            return
        config = case.origin.config
        renderer = self._renderer(config)
        if isinstance(renderer, str):
            for found in findings.values():
                found.unchecked.append(f"prompt and text: {renderer}")
        else:
            for sample in case.samples:
                compare_text(sample.text, renderer.decode(sample.token_ids), findings[sample.index])
        if not self._with_prompts:
            return
        task = self._task(config)
        if isinstance(task, str):
            for found in findings.values():
                found.unchecked.append(f"prompt and reward: {task}")
            return
        self._look_at_prompt(case, task, renderer, findings)
        if self._with_rewards:
            self._look_at_rewards(case, task, findings)

    def _look_at_prompt(
        self, case: Case, task: Task, renderer: PromptRenderer | str, findings: Mapping[int, Findings]
    ) -> None:
        origin = case.origin
        assert origin is not None
        prompts = task.split(origin.split)
        found = prompts[origin.prompt_index].prompt_id if origin.prompt_index < len(prompts) else None
        for each in findings.values():
            if found != origin.prompt_id:
                each.add("prompt", f"prompt {origin.prompt_index} of the task is {found!r}, and was "
                         f"{origin.prompt_id!r}")  # fmt: skip
            elif not isinstance(renderer, str) and case.prompt_ids:
                try:
                    compare_prompt(case.prompt_ids, renderer.encode(prompts[origin.prompt_index]), each)
                except UnisonError as error:
                    each.add("prompt", f"it can't be rendered: {error}")

    # ---- rewards -----------------------------------------------------------------------------------------------------

    def _look_at_rewards(self, case: Case, task: Task, findings: Mapping[int, Findings]) -> None:
        """Call the functions twice; what gives the same value twice is held to it."""
        origin = case.origin
        assert origin is not None
        if case.damage or origin.prompt_index >= len(task.split(origin.split)):
            for each in findings.values():
                each.unchecked.append("reward: the group can't be put together again")
            return
        labels = [reward.label for reward in task.rewards if reward.is_deterministic is not False]
        left_out = [reward.label for reward in task.rewards if reward.is_deterministic is False]
        certain = {reward.label for reward in task.rewards if reward.is_deterministic}
        if left_out:
            for each in findings.values():
                each.unchecked.append(f"reward: {', '.join(left_out)} isn't deterministic, as it says itself")
        if not labels:
            return
        try:
            first, second = (self._score(case, labels) for _ in range(2))
        except RewardError as error:
            for each in findings.values():
                each.unchecked.append(f"reward: {error}")
            return
        for sample, one, other in zip(case.samples, first, second, strict=True):
            same = {label: value for label, value in one.parts.items()
                    if label in certain or other.parts.get(label) == value}  # fmt: skip
            wavering = sorted((one.parts.keys() | other.parts.keys()) - same.keys())
            if wavering:
                findings[sample.index].unchecked.append(f"reward: {', '.join(wavering)} gave two values")
            total = None if wavering or left_out else one.total
            compare_rewards(sample, total, same, findings[sample.index])

    def _score(self, case: Case, labels: list[str]) -> tuple[RewardScore, ...]:
        origin = case.origin
        assert origin is not None
        completions = tuple(_completion(sample) for sample in case.samples)
        raw = RawRollout(case.order, "verify", origin.split, origin.prompt_id, case.prompt_ids, completions,
                         tuple(sample.text for sample in case.samples))  # fmt: skip
        key = _source(origin.config)
        if key not in self._scorers:
            rollout = origin.config.rollout
            self._scorers[key] = Scorer(key, rollout.reward_timeout_s, rollout.reward_attempts)
        return self._runner.run(self._scorers[key].score(raw, origin.prompt_index, labels))

    # ---- what is loaded once -----------------------------------------------------------------------------------------

    def _task(self, config: TrainConfig) -> Task | str:
        key = _source(config)
        if key not in self._tasks:
            try:
                self._tasks[key] = load_task(*key)
            except UnisonError as error:
                self._tasks[key] = str(error)
        return self._tasks[key]

    def _renderer(self, config: TrainConfig) -> PromptRenderer | str:
        key = (config.serve.model, config.task.system_prompt)
        if key not in self._renderers:
            self._renderers[key] = _load_renderer(*key)
        return self._renderers[key]


def _source(config: TrainConfig) -> tuple[str, str, str]:
    return config.task.source, config.task.rewards, config.task.options


def _load_renderer(model: str, system_prompt: str) -> PromptRenderer | str:
    from transformers import AutoTokenizer  # late: it takes seconds, and nobody needs it for numbers

    if not Path(model).is_dir():
        return f"the model's directory {model} is gone"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # a tokenizer's files are its author's: they may make it raise anything
        return f"the tokenizer in {model} can't be loaded: {error!r}"[:500]
    return PromptRenderer(tokenizer, system_prompt)


def _completion(sample: StoredSample) -> Completion:
    """As the scorer takes it."""
    return Completion(
        sample.index, sample.token_ids, sample.logprobs, sample.raw_logprobs, (0.0,) * len(sample.token_ids),
        FinishReason(sample.finish_reason), sample.versions, sample.kv_versions, sample.seed, sample.matched_stop,
    )  # fmt: skip
