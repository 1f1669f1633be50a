"""ModelSpec: what a model's config.json asks for, in this engine's own terms.

Owns: reading a Hugging Face configuration, and refusing by name what isn't implemented: never silently wrong logits.
Knows nothing of tensors. Called by the engine and the trainer before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ipc.errors import ModelError, UnsupportedModelError
from .rope import RopeSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""`model_type` values that are implemented (SmolLM2 is a llama)."""

_READ = frozenset(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim hidden_act max_position_embeddings rms_norm_eps attention_bias mlp_bias tie_word_embeddings rope_theta "
    "rope_scaling rope_parameters sliding_window use_sliding_window max_window_layers layer_types no_rope_layers "
    "no_rope_layer_interval bos_token_id eos_token_id partial_rotary_factor".split()
)
_HARMLESS = frozenset(
    "architectures attention_dropout torch_dtype dtype transformers_version use_cache initializer_range pretraining_tp "
    "pad_token_id _name_or_path is_llama_config rope_interleaved transformers.js_config unsloth_version "
    "unsloth_fixed auto_map id2label label2id output_attentions output_hidden_states return_dict "
    "chunk_size_feed_forward is_encoder_decoder problem_type "
    "task_specific_params name_or_path torchscript use_bfloat16 finetuning_task".split()
)
"""Keys that don't change logits at inference."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (False, None),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "use_qk_norm": (None,),
    "is_decoder": (None, False, True),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
    "tie_encoder_decoder": (None, False),
}
"""Keys that are accepted only with a value that asks for nothing."""


@dataclass(frozen=True)
class ModelSpec:
    """The shape of one decoder.

    Invariants: `num_heads` is a multiple of `num_kv_heads`; the per-layer tuples have `num_layers` entries.
    """

    family: str
    """`model_type` of the configuration."""
    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the MLP."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads."""
    head_dim: int
    """Width of one head."""
    max_position_embeddings: int
    """The model's context in tokens."""
    rms_norm_eps: float
    """Added to the mean square before its root."""
    qkv_bias: bool
    """Biases on the query, key and value projections."""
    o_bias: bool
    """Bias on the attention's output projection."""
    mlp_bias: bool
    """Biases on the MLP's projections."""
    qk_norm: bool
    """RMSNorm per query and key head (Qwen3)."""
    is_tied: bool
    """The vocabulary projection is the embedding."""
    rope: RopeSpec
    """Rotary position embedding."""
    rope_layers: tuple[bool, ...]
    """Per layer: whether it rotates queries and keys (False: NoPE)."""
    windows: tuple[int, ...]
    """Per layer: positions that a query sees, its own included; 0 means all."""
    bos_token_id: int | None
    """Beginning-of-sequence token."""
    eos_token_ids: tuple[int, ...]
    """Every token that ends a completion."""

    @property
    def attention_scale(self) -> float:
        """Factor on query·key."""
        return float(self.head_dim**-0.5)

    @staticmethod
    def from_dir(directory: Path) -> ModelSpec:
        """Read config.json and, for the EOS ids, generation_config.json.

        Raises:
            ModelError: there is no readable config.json.
            UnsupportedModelError: it asks for something that isn't implemented; names the option.
        """
        config = _read_json(directory / "config.json")
        if config is None:
            raise ModelError(
                f"{directory} has no config.json; give a Hugging Face model directory (see bin/fetch-model)"
            )
        generation = _read_json(directory / "generation_config.json") or {}
        return ModelSpec.from_config(config, generation)

    @staticmethod
    def from_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
        """Build from the parsed config.json; `generation`'s token ids win over the model's own."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise UnsupportedModelError("model_type", f"is {family!r}; implemented are {', '.join(FAMILIES)}")
        _refuse_unknown(config)
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise UnsupportedModelError("hidden_act", f"is {config['hidden_act']!r}; implemented is silu")
        heads, layers = _need(config, "num_attention_heads"), _need(config, "num_hidden_layers")
        hidden = _need(config, "hidden_size")
        kv_heads = config.get("num_key_value_heads") or {"mistral": 8, "qwen2": 32, "qwen3": 32, "smollm3": 4}.get(
            family, heads
        )
        if heads % kv_heads:
            raise UnsupportedModelError(
                "num_key_value_heads", f"is {kv_heads}, which doesn't divide {heads} query heads"
            )
        head_dim = config.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
        rope_layers = _rope_layers(config, family, layers)
        has_bias = bool(config.get("attention_bias", False))
        eos = (generation or {}).get("eos_token_id", config.get("eos_token_id"))
        max_positions = _need(config, "max_position_embeddings")
        return ModelSpec(
            family=family,
            vocab_size=_need(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_need(config, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            qkv_bias=family == "qwen2" or (has_bias and family != "mistral"),
            o_bias=has_bias and family in ("llama", "qwen3", "smollm3"),
            mlp_bias=bool(config.get("mlp_bias", False)) and family in ("llama", "smollm3"),
            qk_norm=family == "qwen3",
            is_tied=bool(config.get("tie_word_embeddings", family == "smollm3")),
            rope=RopeSpec.from_config(config, head_dim, 2_000_000.0 if family == "smollm3" else 10_000.0),
            rope_layers=rope_layers,
            windows=_windows(config, family, rope_layers),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}; must be a JSON object")
    return value


def _need(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}; must be a positive integer")
    return value


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    """A key that is neither read nor known to be harmless might change logits: refuse it by name."""
    for key, value in config.items():
        if key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                raise UnsupportedModelError(key, f"is {value!r}; that isn't implemented")
        elif key not in _READ and key not in _HARMLESS:
            raise UnsupportedModelError(key, f"is {value!r}; this key isn't known, and it might change the logits")


def _rope_layers(config: Mapping[str, Any], family: str, layers: int) -> tuple[bool, ...]:
    given = config.get("no_rope_layers")
    if family != "smollm3":
        if given is not None and not all(given):
            raise UnsupportedModelError("no_rope_layers", f"is implemented for smollm3, not for {family}")
        return (True,) * layers
    if given is None:
        interval = config.get("no_rope_layer_interval", 4)
        return tuple(bool((index + 1) % interval) for index in range(layers))
    if len(given) != layers:
        raise ModelError(f"config.json: no_rope_layers has {len(given)} entries for {layers} layers")
    return tuple(bool(entry) for entry in given)


def _windows(config: Mapping[str, Any], family: str, rope_layers: tuple[bool, ...]) -> tuple[int, ...]:
    layers = len(rope_layers)
    window = config.get("sliding_window", 4096 if family in ("mistral", "qwen2", "qwen3") else None) or 0
    kinds = config.get("layer_types")
    if kinds is not None and set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            "layer_types", f"has {sorted(set(kinds))}; implemented are full_attention, sliding_attention"
        )
    if family == "mistral":
        if kinds is not None and len(set(kinds)) > 1:
            raise UnsupportedModelError("layer_types", "alternate; mistral has one kind for all layers")
        return (window,) * layers
    if family == "llama" or not config.get("use_sliding_window", False) or not window:
        if kinds is not None and "sliding_attention" in kinds:
            raise UnsupportedModelError(
                "layer_types", f"has sliding_attention, but {family} is configured without a window"
            )
        return (0,) * layers
    if kinds is None:
        if family == "smollm3":
            return tuple(0 if has_rope else window for has_rope in rope_layers)
        first = config.get("max_window_layers", 28)
        return tuple(window if index >= first else 0 for index in range(layers))
    if len(kinds) != layers:
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries for {layers} layers")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
