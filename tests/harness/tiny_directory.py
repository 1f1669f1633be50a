"""A Hugging Face directory of the tiny decoder, so that whole processes start in about a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .byte_tokenizer import VOCAB_SIZE as BYTES_VOCAB_SIZE
from .byte_tokenizer import byte_tokenizer
from .tiny_model import EOS, VOCAB_SIZE, tiny_spec, tiny_weights

TINY_CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": True, "eos_token_id": [EOS, 3],
}  # fmt: skip


def write_tiny_directory(directory: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Write config.json and model.safetensors of `tiny_weights(seed)`; returns the weights."""
    weights = tiny_weights(tiny_spec(), seed, dtype)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(TINY_CONFIG))
    save_file({name: view.clone() for name, view in weights.items() if name != "lm_head.weight"},
              directory / "model.safetensors")  # fmt: skip
    return weights


def write_tiny_chat_directory(directory: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
    """The same with a vocabulary for bytes, a tokenizer and a chat template: what training needs."""
    vocab_size = -(-BYTES_VOCAB_SIZE // 8) * 8
    weights = tiny_weights(tiny_spec(vocab_size=vocab_size), seed, dtype)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(TINY_CONFIG | {"vocab_size": vocab_size}))
    save_file({name: view.clone() for name, view in weights.items() if name != "lm_head.weight"},
              directory / "model.safetensors")  # fmt: skip
    byte_tokenizer().save_pretrained(directory)
