"""llama.cpp over a BF16 (or F32) GGUF file, its own batches, sequences and KV cache; drawing in numpy.

Owns: the GGUF file (written once, into the peer's cache folder), the decode loop, and how a group shares its prompt: a
prefix that all prompts have in common is computed once, a prompt's KV once per group.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .protocol import Load, Loaded, Work, speak, stop_tokens

BATCH_TOKENS = 512
MAX_SEQUENCES = 128
CACHE_TOKENS = 65536
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def load(request: Load) -> Loaded:
    """A context with one KV cache for all sequences."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    model_options = llama_cpp.llama_model_default_params()
    path = converted(Path(request.model), Path(request.cache), request.dtype)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_options)
    if not model:
        raise ValueError(f"llama.cpp refused {path.name}")
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = CACHE_TOKENS, BATCH_TOKENS, BATCH_TOKENS
    options.n_seq_max, options.kv_unified = MAX_SEQUENCES, True
    options.n_threads = options.n_threads_batch = request.threads
    options.type_k = options.type_v = 30 if request.dtype == "bfloat16" else 0  # GGML_TYPE_BF16, GGML_TYPE_F32
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise ValueError("llama.cpp made no context")
    decoder = Decoder(llama_cpp, context, llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
    stops = stop_tokens(request.model)

    def run(work: Work) -> tuple[float, int]:
        started = time.perf_counter()
        num_tokens = decoder.generate(work, stops)
        return time.perf_counter() - started, num_tokens

    decoder.kept = (quiet, model)
    notes = "llama_decode over batches of all sequences, a prompt's KV once per group, BF16 weights and KV cache"
    return Loaded(run, ("llama-cpp-python", "gguf"), "all", notes)


class Decoder:
    """One context and its batch. Life: each `generate` begins with an empty cache."""

    def __init__(self, library: Any, context: Any, vocab_size: int) -> None:
        import numpy

        self.numpy: Any = numpy
        self.library, self.context, self.vocab_size = library, context, vocab_size
        self.batch = library.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.memory = library.llama_get_memory(context)
        self.draw = numpy.random.default_rng(1)
        self.kept: tuple[Any, ...] = ()
        """What must live as long as the context."""

    def generate(self, work: Work, stops: set[int]) -> int:
        """All completions; returns their tokens."""
        self.library.llama_memory_clear(self.memory, True)
        shared = len(os.path.commonprefix(work.prompts)) if len(work.prompts) > 1 else 0
        shared = min(shared, min(map(len, work.prompts)) - 1)
        live: dict[int, tuple[int, int]] = {}  # sequence → token to feed, its position
        for at, prompt in enumerate(work.prompts):
            first = at * work.n
            begin = shared if at else 0
            if begin:
                self.library.llama_memory_seq_cp(self.memory, 0, first, 0, shared)
            logits = self._decode([(token, begin + place, first) for place, token in enumerate(prompt[begin:])], False)
            tokens = self._choose(self.numpy.repeat(logits, work.n, axis=0), work.temperature)
            for member, token in enumerate(tokens):
                if member:
                    self.library.llama_memory_seq_cp(self.memory, first, first + member, -1, -1)
                live[first + member] = (token, len(prompt))
        lengths = dict.fromkeys(live, 1)
        while live := {at: it for at, it in live.items() if self._goes_on(it[0], lengths[at], work, stops)}:
            logits = self._decode([(token, position, at) for at, (token, position) in live.items()], True)
            tokens = self._choose(logits, work.temperature)
            live = {at: (token, live[at][1] + 1) for at, token in zip(live, tokens, strict=True)}
            for at in live:
                lengths[at] += 1
        return sum(lengths.values())

    @staticmethod
    def _goes_on(token: int, length: int, work: Work, stops: set[int]) -> bool:
        return length < work.max_tokens and (work.ignore_eos or token not in stops)

    def _decode(self, rows: list[tuple[int, int, int]], is_every: bool) -> Any:
        """Logits of every row (token, position, sequence), or of the last one alone. Shape [rows, vocab]."""
        found = []
        for part, is_last_part in _parts(rows):
            batch = self.batch
            batch.n_tokens = len(part)
            for at, (token, position, sequence) in enumerate(part):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
                batch.seq_id[at][0] = sequence
                batch.logits[at] = is_every or (is_last_part and at == len(part) - 1)
            code = self.library.llama_decode(self.context, batch)
            if code:
                raise ValueError(f"llama_decode answered {code}")
            if is_every or is_last_part:
                count = len(part) if is_every else 1
                values = self.library.llama_get_logits(self.context)
                found.append(self.numpy.ctypeslib.as_array(values, shape=(count, self.vocab_size)).copy())
        return self.numpy.concatenate(found)

    def _choose(self, logits: Any, temperature: float) -> list[int]:
        """A token per row, with its log-prob, which is computed as the others' are and then dropped."""
        numpy = self.numpy
        rows = numpy.arange(len(logits))
        scaled = logits / temperature if temperature else logits
        weights = numpy.exp(scaled - scaled.max(-1, keepdims=True))
        sums = weights.sum(-1)
        if temperature:
            cumulative = weights.cumsum(-1)
            tokens = (cumulative < (self.draw.random(len(rows)) * cumulative[:, -1])[:, None]).sum(-1)
            tokens = tokens.clip(max=self.vocab_size - 1)
        else:
            tokens = scaled.argmax(-1)
        numpy.log(weights[rows, tokens] / sums)
        chosen: list[int] = tokens.tolist()
        return chosen


def _parts(rows: list[tuple[int, int, int]]) -> Iterator[tuple[list[tuple[int, int, int]], bool]]:
    """Batches of at most BATCH_TOKENS rows, and whether each is the last."""
    for start in range(0, len(rows), BATCH_TOKENS):
        yield rows[start : start + BATCH_TOKENS], start + BATCH_TOKENS >= len(rows)


def converted(model: Path, cache: Path, dtype: str) -> Path:
    """The model as a GGUF file without a vocabulary, written at the first call."""
    weights = (model / "model.safetensors").stat()
    target = cache / f"{model.name}-{dtype}-{weights.st_size}-{int(weights.st_mtime)}.gguf"
    if not target.exists():
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        write_gguf(model, partial, dtype)
        partial.rename(target)
    return target


def write_gguf(model: Path, target: Path, dtype: str) -> None:
    """A Llama model of one safetensors file in bfloat16 or float32, its matrices in `dtype`, its norms in float32."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("rope_scaling"):
        raise ValueError("only plain Llama models are converted")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    kind = gguf.GGMLQuantizationType.BF16 if dtype == "bfloat16" else gguf.GGMLQuantizationType.F32
    for name, values in _tensors(model / "model.safetensors"):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            count = heads if "q_proj" in name else kv_heads
            values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(_gguf_name(name), values)
        else:
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of a safetensors file, as float32."""
    import numpy

    data = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    for name, entry in json.loads(data[8:start].tobytes()).items():
        if name == "__metadata__":
            continue
        low, high = entry["data_offsets"]
        raw = data[start + low : start + high].tobytes()
        if entry["dtype"] == "BF16":
            values = (numpy.frombuffer(raw, numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
        elif entry["dtype"] == "F32":
            values = numpy.frombuffer(raw, numpy.float32)
        else:
            raise ValueError(f"{name} is {entry['dtype']}")
        yield name, values.reshape(entry["shape"])


def _gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    if name in fixed:
        return fixed[name]
    layer, _, inner = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_NAMES[inner.removesuffix('.weight')]}.weight"


if __name__ == "__main__":
    sys.exit(speak(load))
