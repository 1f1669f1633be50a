"""The engine's parts and how they are put together.

Owns: the order of construction and nothing else: layout → kernels → decoder → KV pool → scheduler → executor. Called by
`Engine` when it is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ipc.errors import ConfigError
from ..ipc.types import PolicyVersion
from .attention import AttentionBackend, select_attention, split_tokens_for
from .cache.buffer import KVBuffer
from .cache.pool import KVPool
from .cache.requests import RequestCaches
from .cache.sizing import pool_tokens
from .cache.strategy import AllocationStrategy, ContiguousStrategy, PagedStrategy
from .config import EngineConfig, available_cores
from .guard import PolicyVersionGuard
from .kernels import Kernels, NativeKernels, select_kernels
from .metrics import EngineMetrics
from .models.decoder import Decoder
from .models.layout import DecoderWeights, WeightLayout
from .models.spec import ModelSpec
from .runtime.exactness import Exactness, check_exactness
from .runtime.executor import Executor
from .runtime.sample import Sampler
from .runtime.workspace import Workspace
from .scheduler import Scheduler
from .stepper import Stepper
from .validation import Limits


@dataclass(frozen=True, eq=False)
class ForwardParts:
    """What computes a forward pass; the engine and a trainer of the same configuration have the same, so they give the
    same bits."""

    kernels: Kernels
    """The arithmetic."""
    attention: AttentionBackend
    """How it attends."""
    decoder: Decoder
    """The model definition."""

    def describe(self) -> dict[str, object]:
        """What computes, and the settings that its bits depend on, as plain values."""
        return {"kernels": self.kernels.describe(), "attention": self.attention.describe()}


@dataclass(frozen=True, eq=False)
class EngineParts:
    """Everything an engine is made of; each part says itself what it owns."""

    layout: WeightLayout
    """Where weights lie."""
    limits: Limits
    """What a request has to fit into."""
    guard: PolicyVersionGuard[DecoderWeights]
    """Versions and the generation/weight exclusion."""
    caches: RequestCaches
    """KV of the requests."""
    scheduler: Scheduler
    """Who runs."""
    stepper: Stepper
    """One step."""
    metrics: EngineMetrics
    """What was done, and how fast."""
    decoder: Decoder
    """The model definition."""
    attention: AttentionBackend
    """How it attends."""
    exactness: Exactness
    """Outcome of the self-test."""
    buffer: KVBuffer
    """The KV tensors."""


def forward_parts(spec: ModelSpec, config: EngineConfig) -> ForwardParts:
    """Kernels, attention and decoder for one model on one device.

    Raises:
        ConfigError: the machine can't do what is asked for.
    """
    device, runtime = torch.device(config.device), config.runtime
    kernels = _kernels(config, device)
    split = split_tokens_for(spec.max_position_embeddings, config.attention.max_kv_splits)
    attention = select_attention(device, runtime.kernels, runtime.exact, split, config.attention.query_tile_rows)
    return ForwardParts(kernels, attention, Decoder(spec, kernels, device))


def assemble(
    spec: ModelSpec, weights: Mapping[str, Tensor], config: EngineConfig, ordinals: tuple[int, int]
) -> EngineParts:
    """Build all parts for one model on one device. `ordinals`: that of `weights`, and the highest ever given.

    Raises:
        WeightsError, ConfigError: the weights or the configuration don't fit; nothing stays allocated.
    """
    device = torch.device(config.device)
    dtype: torch.dtype = getattr(torch, config.dtype)
    layout = WeightLayout(spec, dtype)
    bound = layout.bind(weights)
    version = PolicyVersion(ordinals[0], layout.manifest(weights).digest)
    versions = config.versions
    guard = PolicyVersionGuard(version, bound, versions.max_installed, versions.lock_timeout_s, ordinals[1])
    forward = forward_parts(spec, config)
    kernels, attention, decoder = forward.kernels, forward.attention, forward.decoder
    exactness = check_exactness(decoder, bound, attention)

    max_len = _max_len(config, spec)
    strategy = _strategy(config, spec, max_len, dtype, device)
    limits = Limits(spec.vocab_size, max_len, strategy.num_blocks * strategy.block_size)
    max_blocks = min(-(-max_len // strategy.block_size), strategy.num_blocks)
    caches = RequestCaches(KVPool(strategy, config.scheduler.max_num_seqs, max_blocks))
    num_slots = strategy.num_blocks * strategy.block_size
    buffer = KVBuffer(spec.num_layers, num_slots, spec.num_kv_heads, spec.head_dim, dtype, device)
    workspace = Workspace(config.scheduler.max_step_tokens, config.scheduler.max_num_seqs, max_blocks, device)
    sampler = Sampler(spec.vocab_size, kernels, device)
    window = config.sampling.penalty_window_tokens
    executor = Executor(decoder, attention, sampler, buffer, caches, workspace, window, guard.weights_of)
    if config.runtime.cuda_graphs if device.type == "cuda" else config.runtime.tapes and kernels.name == "native":
        executor.capture_decodes()
    metrics = EngineMetrics(config.metrics.recent_requests)
    scheduler = Scheduler(config.scheduler, caches, guard, config.cache.prefix_caching, limits.max_len)
    stepper = Stepper(guard, scheduler, executor, metrics)
    return EngineParts(
        layout, limits, guard, caches, scheduler, stepper, metrics, decoder, attention, exactness, buffer
    )


def _kernels(config: EngineConfig, device: torch.device) -> Kernels:
    try:
        kernels = select_kernels(device, config.runtime.kernels, config.runtime.exact)
    except (ValueError, RuntimeError) as error:
        raise ConfigError("runtime.kernels", f"is {config.runtime.kernels!r}: {error}") from error
    threads = config.runtime.num_threads or available_cores()
    if isinstance(kernels, NativeKernels):
        kernels.set_num_threads(threads)
    if config.runtime.num_threads is not None:
        torch.set_num_threads(threads)
    return kernels


def _max_len(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len is None:
        return spec.max_position_embeddings
    if config.max_model_len > spec.max_position_embeddings:
        raise ConfigError(
            "max_model_len", f"is {config.max_model_len}; the model's context is {spec.max_position_embeddings} tokens"
        )
    return config.max_model_len


def _strategy(
    config: EngineConfig, spec: ModelSpec, max_len: int, dtype: torch.dtype, device: torch.device
) -> AllocationStrategy:
    per_token = KVBuffer.bytes_per_slot(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)
    tokens = pool_tokens(config.cache, config.scheduler, max_len, per_token, device)
    if config.cache.strategy == "contiguous":
        return ContiguousStrategy(tokens // max_len, max_len)
    return PagedStrategy(tokens // config.cache.block_size_tokens, config.cache.block_size_tokens)
