"""What a finished directory must satisfy before anyone may use it.

Reads the directory the way its users will (safetensors, transformers' tokenizer), so that a conversion that went wrong
is found here and not as bad text later.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch
from safetensors import safe_open

from .recipe import FetchError, Recipe

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""Every file that a finished directory has."""

_ROUND_TRIP_TEXTS = (
    "The quick brown fox jumps over 12 lazy dogs, twice.",
    "def area(r):\n    return 3.14159 * r ** 2  # m²\n",
    "  leading, trailing and   inner   spaces \n\n",
    "日本語と한국어, naïve café, 😀👩‍🔬",
)


def check_directory(recipe: Recipe, folder: Path) -> None:
    """Raises: FetchError with what is wrong, unless `folder` holds the recipe's model, whole and byte for byte."""
    missing = [name for name in MODEL_FILES if not (folder / name).is_file()]
    if missing:
        raise FetchError(f"{folder} lacks {', '.join(missing)}.")
    _check_tensors(recipe, folder)
    _check_tokenizer(recipe, folder)


def digest_tensors(path: Path) -> tuple[str, int]:
    """SHA-256 over the tensors of a safetensors file in the order of their names, and the number of their elements.

    Each tensor counts with its name, dtype, shape and bytes; how the file is laid out doesn't matter.
    """
    digest = hashlib.sha256()
    num_parameters = 0
    with safe_open(str(path), framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            num_parameters += tensor.numel()
    return digest.hexdigest(), num_parameters


def _check_tensors(recipe: Recipe, folder: Path) -> None:
    found, num_parameters = digest_tensors(folder / "model.safetensors")
    if num_parameters != recipe.num_parameters:
        raise FetchError(f"{folder} holds {num_parameters:,} parameters, expected {recipe.num_parameters:,}.")
    if found != recipe.tensors_sha256:
        raise FetchError(f"{folder}: tensors have digest {found}, expected {recipe.tensors_sha256}.")


def _check_tokenizer(recipe: Recipe, folder: Path) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer  # takes seconds to import, and only a directory with good tensors needs it

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    for text in _ROUND_TRIP_TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decode(token_ids) != text:
            raise FetchError(f"{folder}: the tokenizer turns {text!r} into {tokenizer.decode(token_ids)!r}.")
    end_of_turn = recipe.eos_tokens[0]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi."}], tokenize=False, add_generation_prompt=True
    )
    if f"user\nHi.{end_of_turn}" not in rendered or not rendered.endswith("assistant\n"):
        raise FetchError(f"{folder}: the chat template renders {rendered!r}.")
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    eos_ids = [tokenizer.convert_tokens_to_ids(text) for text in recipe.eos_tokens]
    if generation["eos_token_id"] != eos_ids:
        raise FetchError(f"{folder}: generation_config.json ends at {generation['eos_token_id']}, expected {eos_ids}.")
