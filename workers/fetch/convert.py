"""From a GGUF file to the files of a Hugging Face directory: tensors, configuration, tokenizer.

Owns the correspondence between GGUF's names and layouts and Hugging Face's, for the Llama architecture. The tensors are
dequantised in fp32 and rounded once to bfloat16, so the result is the same on every machine.

Needs the `gguf` package (extras `demo` and `test`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .recipe import Architecture, FetchError, Recipe

_TOKEN_TYPE_CONTROL = 3
"""GGUF's mark of a token that text can't spell."""

_HF_NAME_BY_GGUF_NAME = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_HF_LAYER_NAME_BY_GGUF_NAME = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert_gguf(recipe: Recipe, gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` into the existing, empty `folder` as Hugging Face files.

    Raises: FetchError when the file holds another architecture than the recipe's, or a tensor without a known name.
    """
    reader = GGUFReader(str(gguf))
    _check_architecture(recipe.architecture, reader)
    tensors = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            is_query = name.endswith("q_proj.weight")
            heads = recipe.architecture.num_attention_heads if is_query else recipe.architecture.num_key_value_heads
            values = _split_rotary_pairs(values, heads)
        tensors[name] = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})

    vocabulary: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
    token_types: list[int] = reader.fields["tokenizer.ggml.token_type"].contents()
    merges: list[str] = reader.fields["tokenizer.ggml.merges"].contents()
    control_tokens = [text for text, kind in zip(vocabulary, token_types, strict=True) if kind == _TOKEN_TYPE_CONTROL]
    _build_tokenizer(vocabulary, merges, control_tokens).save(str(folder / "tokenizer.json"))
    id_by_text = {text: token_id for token_id, text in enumerate(vocabulary)}
    _write_json(folder / "config.json", _config(recipe, id_by_text))
    _write_json(folder / "generation_config.json", _generation_config(recipe, id_by_text))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(recipe))
    template: str = reader.fields["tokenizer.chat_template"].contents()
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _check_architecture(wanted: Architecture, reader: GGUFReader) -> None:
    """Refuse a GGUF file whose own numbers differ from the recipe's."""
    found = {
        key: reader.fields[f"llama.{key}"].contents() if f"llama.{key}" in reader.fields else None
        for key in ("vocab_size", "embedding_length", "feed_forward_length", "block_count", "attention.head_count",
                    "attention.head_count_kv", "context_length", "rope.freq_base", "attention.layer_norm_rms_epsilon")
    }
    expected = (wanted.vocab_size, wanted.hidden_size, wanted.intermediate_size, wanted.num_hidden_layers,
                wanted.num_attention_heads, wanted.num_key_value_heads, wanted.max_position_embeddings,
                wanted.rope_theta, wanted.rms_norm_eps)
    for (key, value), number in zip(found.items(), expected, strict=True):
        # GGUF keeps its floats in 32 bits: 1e-5 comes back as 9.9999997e-06.
        if value is None or np.float32(value) != np.float32(number):
            raise FetchError(f"The GGUF file says llama.{key} = {value}, expected {number}: it is another model.")


def _hf_name(gguf_name: str) -> str:
    """Hugging Face's name of a GGUF tensor."""
    if gguf_name in _HF_NAME_BY_GGUF_NAME:
        return _HF_NAME_BY_GGUF_NAME[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    layer, _, suffix = rest.partition(".")
    if prefix != "blk" or not layer.isdigit() or suffix not in _HF_LAYER_NAME_BY_GGUF_NAME:
        raise FetchError(f"The GGUF file holds a tensor {gguf_name!r} that a Llama model hasn't.")
    return f"model.layers.{layer}.{_HF_LAYER_NAME_BY_GGUF_NAME[suffix]}"


def _split_rotary_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k matrix from GGUF's order (the two of a rotary pair are neighbours) to Hugging Face's (halves).

    Shapes: rows [num_heads * head_dim, hidden_size], the result as well.
    """
    head_dim = rows.shape[0] // num_heads
    paired = rows.reshape(num_heads, head_dim // 2, 2, rows.shape[1])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _build_tokenizer(vocabulary: list[str], merges: list[str], control_tokens: list[str]) -> Tokenizer:
    """Byte-level BPE as the SmolLM family was trained with: each digit is a piece of its own."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    bpe = models.BPE(vocab={text: token_id for token_id, text in enumerate(vocabulary)}, merges=pairs)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control_tokens])
    return tokenizer


def _config(recipe: Recipe, id_by_text: dict[str, int]) -> dict[str, Any]:
    """`config.json`."""
    shape = recipe.architecture
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.hidden_size // shape.num_attention_heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": id_by_text[recipe.bos_token],
        "eos_token_id": id_by_text[recipe.eos_tokens[0]],
        "pad_token_id": id_by_text[recipe.pad_token],
        "dtype": "bfloat16",
    }


def _generation_config(recipe: Recipe, id_by_text: dict[str, int]) -> dict[str, Any]:
    """`generation_config.json`: every token that ends a completion, not only the first."""
    return {
        "bos_token_id": id_by_text[recipe.bos_token],
        "eos_token_id": [id_by_text[text] for text in recipe.eos_tokens],
        "pad_token_id": id_by_text[recipe.pad_token],
    }


def _tokenizer_config(recipe: Recipe) -> dict[str, Any]:
    """`tokenizer_config.json`; the class is the one that takes tokenizer.json as it stands."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.architecture.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "bos_token": recipe.bos_token,
        "eos_token": recipe.eos_tokens[0],
        "pad_token": recipe.pad_token,
        "unk_token": recipe.unk_token,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
