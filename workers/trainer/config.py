"""TrainConfig and its parts: every constant of rollouts and training, with unit, bound and default.

Owns: the knobs of bin/train around those of bin/serve, which are the section `serve`. One way in, as for bin/serve.
Frozen after start. docs/configuration.md is compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...engine.settings import Checked, bounded, from_dict, to_dict
from ...ipc.errors import ConfigError
from ..config import ServeConfig


@dataclass(frozen=True)
class Recipe:
    """What an algorithm is made of."""

    advantages: str
    """Name of the estimator (advantages.py)."""
    objective: str
    """Name of the per-token loss (losses.py)."""
    aggregation: str
    """Name of the denominators (losses.py, `token_weights`)."""


RECIPES = {
    "grpo": Recipe("group_normalized", "token_clipped", "sequence_mean"),
    "dr_grpo": Recipe("group_centered", "token_clipped", "fixed_length"),
    "dapo": Recipe("group_normalized", "token_clipped", "token_mean"),
    "gspo": Recipe("group_normalized", "sequence_clipped", "sequence_mean"),
    "rloo": Recipe("leave_one_out", "sequence_product", "sequence_sum"),
    "reinforce_pp": Recipe("batch_normalized", "token_clipped", "token_mean"),
    "reinforce_pp_baseline": Recipe("group_centered_batch_scaled", "token_clipped", "token_mean"),
    "cispo": Recipe("group_normalized", "clipped_weight", "token_mean"),
}


CONFIG_FILE = "train.json"
"""A run's resolved configuration, in its directory."""
_KEEP = re.compile(r"none|all|every:[1-9][0-9]{0,8}")
SAMPLE_TOKEN_BYTES = 40
"""Most bytes of one sampled token in a scored group: id, three log-probs, text."""


@dataclass(frozen=True)
class TaskConfig(Checked):
    """What is learnt."""

    source: str = bounded("sort-words")
    """A built-in task's name, `FILE.py:NAME`, `jsonl:PATH`, or `reasoning_gym:NAME`."""
    rewards: str = bounded("")
    """For `jsonl:`: reward functions as `FILE.py:NAME[=WEIGHT]`, several by comma."""
    options: str = bounded("")
    """JSON object of keyword arguments for the task."""
    system_prompt: str = bounded("")
    """Put before every conversation that has no system turn of its own."""
    num_eval_prompts: int = bounded(64, 1, 1_000_000)
    """Held-out prompts that an evaluation takes, the first ones."""


@dataclass(frozen=True)
class RolloutConfig(Checked):
    """How samples are made."""

    mode: str = bounded("sync", choices=("sync", "async"))
    """`sync`: a batch is drawn, then trained on, all under one version. `async`: generation runs ahead."""
    max_staleness: int = bounded(1, 0, 1000)
    """`async`: most versions between the oldest token of a sample and the weights that are trained (V6)."""
    groups_per_step: int = bounded(8, 1, 100_000)
    """Prompts of one training step."""
    group_size: int = bounded(8, 1, 1024)
    """Completions of one prompt."""
    max_tokens: int = bounded(256, 1, 1_000_000)
    """Longest completion, in tokens."""
    temperature: float = bounded(1.0, 0.01, 100.0)
    """Of the samples that are trained on; the policy that is trained is the one at this temperature."""
    top_k: int = bounded(0, 0, 1_000_000)
    """As in sampling parameters; 0 keeps all. Ratios then compare distributions with different support (P20)."""
    top_p: float = bounded(1.0, 0.001, 1.0)
    """As in sampling parameters; see `top_k`."""
    on_update: str = bounded("finish", choices=("finish", "carry", "recompute"))
    """`async`: what a request does when a version goes live under it."""
    num_workers: int = bounded(1, 1, 8)
    """Rollout worker processes."""
    max_groups_per_worker: int = bounded(64, 1, 100_000)
    """Groups that one rollout worker has in work at once."""
    truncated: str = bounded("train", choices=("train", "mask", "drop"))
    """Completions that ended for length: trained as they are, masked out of the loss, or left out of the group."""
    overlong_buffer_tokens: int = bounded(0, 0, 1_000_000)
    """Last tokens of `max_tokens` over which a completion's reward falls by up to 1 (DAPO); 0: none."""
    zero_variance: str = bounded("keep", choices=("keep", "drop", "refill"))
    """Groups whose rewards are all equal: kept, left out, or replaced by further prompts (dynamic sampling)."""
    max_refill_groups: int = bounded(64, 0, 1_000_000)
    """`refill`: most further prompts of one step."""
    reward_timeout_s: float = bounded(30.0, 0.01, 86_400.0)
    """Longest scoring of one group; then the functions' process is ended."""
    reward_attempts: int = bounded(2, 1, 100)
    """How often a group is scored whose functions failed, before it is rejected."""
    stall_s: float = bounded(300.0, 0.1, 86_400.0)
    """How long a step waits without any rollout coming back before it fails."""
    max_rejected: int = bounded(16, 0, 1_000_000)
    """Rejected rollouts in a row, without an accepted one between, that end the run."""
    ring_mib: int = bounded(16, 1, 2048)
    """Shared memory of each ring between trainer and rollout worker, in MiB; a group takes at most half."""


@dataclass(frozen=True)
class AlgorithmConfig(Checked):
    """What is minimised."""

    name: str = bounded("grpo", choices=tuple(RECIPES))
    """The algorithm: its advantages, objective and denominators (docs/training.md)."""
    clip_low: float = bounded(0.2, 0.0, 1.0)
    """Ratios below 1 - `clip_low` carry no gradient where the advantage is negative."""
    clip_high: float = bounded(0.2, 0.0, 1000.0)
    """Ratios above 1 + `clip_high` carry none where it is positive. DAPO: 0.28; CISPO: 4."""
    num_iterations: int = bounded(1, 1, 1000)
    """Optimizer steps on one batch."""
    kl_coef: float = bounded(0.0, 0.0, 1000.0)
    """Weight of the KL to the weights that the run began with; 0 loads no reference."""
    kl_estimator: str = bounded("k3", choices=("k1", "k2", "k3"))
    """Estimator of the KL."""
    kl_in: str = bounded("loss", choices=("loss", "reward"))
    """Where the KL enters."""
    correction: str = bounded("none", choices=("none", "tis", "icepop", "sequence_tis", "sequence_mask"))
    """Importance-sampling correction of samples that other weights drew."""
    correction_low: float = bounded(0.5, 0.0, 1.0)
    """Lower bound of IcePop and of the sequence mask."""
    correction_high: float = bounded(2.0, 1.0, 1000.0)
    """Upper bound of every correction."""

    @property
    def recipe(self) -> Recipe:
        """What the algorithm is made of."""
        return RECIPES[self.name]


@dataclass(frozen=True)
class OptimizerConfig(Checked):
    """AdamW and what goes into it."""

    learning_rate: float = bounded(1e-5, 0.0, 10.0)
    """Highest learning rate."""
    schedule: str = bounded("constant_with_warmup", choices=(
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "polynomial",
    ))  # fmt: skip
    """Course of the learning rate, by its name in transformers."""
    warmup_steps: int = bounded(0, 0, 1_000_000)
    """Steps over which it rises from 0."""
    beta1: float = bounded(0.9, 0.0, 0.99999)
    """Decay of the first moment."""
    beta2: float = bounded(0.99, 0.0, 0.999999)
    """Decay of the second moment."""
    eps: float = bounded(1e-8, 1e-16, 1.0)
    """Added to the root of the second moment."""
    weight_decay: float = bounded(0.0, 0.0, 10.0)
    """Decoupled weight decay; norms and biases have none."""
    max_grad_norm: float = bounded(1.0, 0.0, 1e9)
    """Gradients are scaled down to this norm; 0 leaves them."""
    micro_batch_tokens: int = bounded(4096, 1, 100_000_000)
    """Tokens of one forward and backward; a group larger than it is cut between completions."""
    activation_checkpointing: bool = bounded(False)
    """Keep one activation per layer and compute the others again in the backward."""
    num_threads: int | None = bounded(None, 1, 1024)
    """CPU threads of the trainer; None: all cores in `sync`, half of them in `async`."""


@dataclass(frozen=True)
class EvaluationConfig(Checked):
    """Held-out prompts, under one pinned version."""

    interval_steps: int = bounded(10, 0, 1_000_000)
    """Training steps between two evaluations; 0: only at the beginning and at the end."""
    temperature: float = bounded(0.0, 0.0, 100.0)
    """0 is greedy."""
    num_samples: int = bounded(1, 1, 1024)
    """Completions per prompt."""


@dataclass(frozen=True)
class CheckpointConfig(Checked):
    """What survives the run."""

    interval_steps: int = bounded(20, 0, 1_000_000)
    """Training steps between two checkpoints; 0: only at the end and at Ctrl-C."""
    keep: int = bounded(2, 1, 10_000)
    """Newest checkpoints that stay."""
    keep_versions: str = bounded("none")
    """Versions whose weights stay on disk for bin/verify: `none`, `all`, or `every:N` for those of every N-th step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if _KEEP.fullmatch(self.keep_versions) is None:
            raise ConfigError("keep_versions", f"is {self.keep_versions!r}; must be none, all, or every:N")

    @property
    def keep_interval(self) -> int:
        """Steps between two versions that are kept; 0: none is."""
        if self.keep_versions in ("none", "all"):
            return int(self.keep_versions == "all")
        return int(self.keep_versions.removeprefix("every:"))


@dataclass(frozen=True)
class CanaryConfig(Checked):
    """Comparison of engine and trainer, always on."""

    num_samples: int = bounded(2, 0, 10_000)
    """`async`: samples per step that the engine scores again; `sync` compares every token."""
    max_difference: float = bounded(0.0, 0.0, 1000.0)
    """Largest difference of a log-prob that is no mismatch."""
    stops_run: bool = bounded(False)
    """End the run at a mismatch."""


@dataclass(frozen=True)
class TrainConfig(Checked):
    """All of bin/train's configuration."""

    steps: int = bounded(100, 1, 100_000_000)
    """Training steps in all."""
    seed: int = bounded(0, 0, 2**31 - 1)
    """Decides the order of prompts and every draw."""
    max_dry_batches: int = bounded(50, 1, 1_000_000)
    """Batches in a row without any signal (all rewards equal) that end the run: a fault where no step was taken yet."""
    tensorboard: bool = bounded(False)
    """Also write TensorBoard files (needs the `tensorboard` package)."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """What is learnt."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How samples are made."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """What is minimised."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and what goes into it."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Held-out prompts."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What survives the run."""
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    """Comparison of engine and trainer."""
    serve: ServeConfig = field(default_factory=ServeConfig)
    """Model, engine, worker, supervisor and HTTP server, as for bin/serve."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rollout = self.rollout
        if rollout.overlong_buffer_tokens > rollout.max_tokens:
            raise ConfigError(
                "rollout.overlong_buffer_tokens",
                f"is {rollout.overlong_buffer_tokens}, above rollout.max_tokens={rollout.max_tokens}",
            )
        if not self.serve.engine.device.startswith("cpu"):
            raise ConfigError(
                "serve.engine.device", f"is {self.serve.engine.device}; training runs on the CPU only, for now"
            )
        group_bytes = rollout.group_size * rollout.max_tokens * SAMPLE_TOKEN_BYTES
        if group_bytes > rollout.ring_mib << 19:
            raise ConfigError(
                "rollout.ring_mib",
                f"is {rollout.ring_mib}; a group of {rollout.group_size} completions of {rollout.max_tokens} tokens "
                f"may take {group_bytes} bytes, and half of the ring must hold it",
            )
        if self.algorithm.num_iterations > 1 and rollout.mode == "async":
            raise ConfigError(
                "algorithm.num_iterations", "is above 1; several steps on one batch need rollout.mode=sync"
            )
        if rollout.group_size == 1 and self.algorithm.recipe.advantages != "batch_normalized":
            raise ConfigError(
                "rollout.group_size",
                f"is 1, and {self.algorithm.name} compares within the group; take at least 2, or reinforce_pp",
            )
        if rollout.group_size == 1 and rollout.zero_variance != "keep":
            raise ConfigError(
                "rollout.zero_variance",
                f"is {rollout.zero_variance}, which would leave out every group of 1 (rollout.group_size); use keep",
            )

    @property
    def max_lag(self) -> int:
        """Most versions between a sample's oldest token and the weights in training."""
        return self.rollout.max_staleness if self.rollout.mode == "async" else 0

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> TrainConfig:
        """Build from nested mappings.

        Raises:
            ConfigError: an unknown key or a value out of bounds, with its dotted name (P4).
        """
        config: TrainConfig = from_dict(TrainConfig, values, "")
        return config

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values; `from_dict` gives an equal configuration back."""
        return to_dict(self)
