"""WeightLayout and the loader: one flat run of bytes, strictly filled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness.tiny_model import tiny_spec, tiny_weights
from safetensors.torch import save_file
from torch import Tensor
from unison.engine.attention import select_attention
from unison.engine.kernels import select_kernels
from unison.engine.models.decoder import Decoder
from unison.engine.models.layout import ALIGNMENT_BYTES, HEAD, WeightLayout
from unison.engine.models.loader import INDEX, SINGLE, load
from unison.engine.models.packed import packed_logprobs
from unison.ipc.errors import WeightsError

CPU = torch.device("cpu")
Q = "model.layers.0.self_attn.q_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"
EMBED = "model.embed_tokens.weight"


def layout(dtype: torch.dtype = torch.float32, tied: bool = True) -> WeightLayout:
    return WeightLayout(tiny_spec(tie_word_embeddings=tied), dtype)


def tensors(tied: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    views = tiny_weights(tiny_spec(tie_word_embeddings=tied), 0, dtype)
    return {name: tensor.clone() for name, tensor in views.items() if not (tied and name == HEAD)}


# ---- layout


def test_fused_matrices_and_names_are_the_same_bytes() -> None:
    """P15, P17, P49: no derived copy that an update could forget; the tied head is the embedding."""
    own = layout()
    views = own.pack(tensors())
    bound = own.bind(views)
    assert bound.layers[0].qkv.data_ptr() == views[Q].data_ptr()
    views[K].fill_(3.0)
    rows = own.entries[Q].shape[0]
    assert (bound.layers[0].qkv[rows : rows + own.entries[K].shape[0]] == 3).all()
    assert views[HEAD].data_ptr() == bound.head.data_ptr() == bound.embedding.data_ptr()
    storages = {tensor.untyped_storage().data_ptr() for tensor in (bound.head, bound.norm, bound.layers[1].gate_up)}
    assert len(storages) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_groups_are_aligned_and_nothing_overlaps(dtype: torch.dtype) -> None:
    """V1: every element belongs to one parameter."""
    own = layout(dtype)
    end = 0
    for entry in own.entries.values():
        assert entry.offset >= end
        end = entry.offset + torch.Size(entry.shape).numel()
    assert end == own.num_elements and own.num_bytes == end * dtype.itemsize
    assert own.entries[Q].offset * dtype.itemsize % ALIGNMENT_BYTES == 0


def test_binding_refuses_what_it_would_have_to_copy() -> None:
    """V1, P13: missing, unexpected, misshapen, wrong dtype, scattered: each is said, with what to do."""
    own = layout()
    views = own.pack(tensors())
    for change, message in (
        ({"surprise": views[Q]}, "unexpected tensors: surprise"),
        ({Q: views[Q][:-1]}, "shape"),
        ({Q: views[Q].bfloat16()}, "bfloat16"),
        ({Q: views[Q].t().contiguous().t()}, "contiguous"),
        ({K: views[K].clone()}, "WeightLayout.pack"),
        ({HEAD: views[HEAD].clone()}, "tied"),
    ):
        with pytest.raises(WeightsError, match=message):
            own.bind(views | change)
    with pytest.raises(WeightsError, match="missing tensors: model.norm.weight"):
        own.bind({name: view for name, view in views.items() if name != "model.norm.weight"})
    with pytest.raises(WeightsError, match="flat vector"):
        own.views(torch.zeros(3))
    with pytest.raises(WeightsError, match="ties them"):
        own.pack(tensors() | {HEAD: torch.zeros(own.entries[EMBED].shape)})


def test_what_is_allocated_is_ordinary() -> None:
    """S12: also for a caller inside inference mode."""
    own = layout()
    with torch.inference_mode():
        flat = own.allocate()
    assert not flat.is_inference() and flat.data_ptr() % (2 << 20) == 0 and not flat.any()


def test_a_manifest_names_what_changed() -> None:
    """V1, P12, P17: one flipped bit changes one entry and the root; the tied head is an alias with its twin's hash."""
    own = layout()
    views = own.pack(tensors())
    before = own.manifest(views)
    views[K].view(torch.uint8)[1, 2] ^= 4
    after = own.manifest(views)
    assert before.differing(after) == (K,) and before.digest != after.digest
    (head,) = [entry for entry in after.entries if entry.name == HEAD]
    assert head.alias_of == EMBED
    views[EMBED].view(torch.uint8)[0, 0] ^= 1
    assert after.differing(own.manifest(views)) == (HEAD, EMBED)


def test_gradients_reach_one_flat_leaf() -> None:
    """R3: a trainer's flat parameter serves the same forward, gets one gradient, and the same bits as without."""
    spec = tiny_spec()
    own = layout()
    views = own.pack(tensors())
    flat = torch.zeros(own.num_elements).requires_grad_()
    with torch.no_grad():
        for name, entry in own.entries.items():
            flat[entry.offset : entry.offset + views[name].numel()] = views[name].flatten()
    decoder = Decoder(spec, select_kernels(CPU))
    attention = select_attention(CPU, "auto", True, 64, 64)
    sequences = [[1, 2, 3, 4, 5], [7], [9, 8, 7]]
    logprobs = packed_logprobs(decoder, own.bind(own.views(flat)), attention, sequences)
    with torch.no_grad():
        plain = packed_logprobs(decoder, own.bind(views), attention, sequences)
    assert [len(part) for part in logprobs] == [4, 0, 2]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(logprobs, plain, strict=True))
    torch.cat(logprobs).sum().backward()
    assert flat.grad is not None and flat.grad.shape == flat.shape
    for name, gradient in own.views(flat.grad).items():
        assert gradient.isfinite().all() and gradient.any(), name


# ---- loader


def write(directory: Path, parts: dict[str, dict[str, Tensor]], index: dict[str, str] | None = None) -> Path:
    for file, content in parts.items():
        save_file(content, directory / file)
    if index is not None:
        (directory / INDEX).write_text(json.dumps({"weight_map": index}))
    return directory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_loads_one_file(tmp_path: Path, dtype: torch.dtype, stored: torch.dtype) -> None:
    """V1: each tensor once, floats rounded to the engine's dtype."""
    content = {name: tensor.to(stored) for name, tensor in tensors().items()}
    views = load(write(tmp_path, {SINGLE: content}), layout(dtype), CPU)
    for name, tensor in content.items():
        assert torch.equal(views[name], tensor.to(dtype))


def test_loads_shards_and_tied_heads(tmp_path: Path) -> None:
    """P17: a sharded index; a stored head that equals its twin is accepted, one that differs is not."""
    content = tensors()
    names = sorted(content)
    parts = {"a.safetensors": {n: content[n] for n in names[:5]}, "b.safetensors": {n: content[n] for n in names[5:]}}
    index = {name: file for file, part in parts.items() for name in part}
    views = load(write(tmp_path, parts, index), layout(), CPU)
    assert all(torch.equal(views[name], content[name]) for name in names)
    one = tmp_path / "one"
    one.mkdir()
    load(write(one, {SINGLE: content | {HEAD: content[EMBED].clone()}}), layout(), CPU)
    with pytest.raises(WeightsError, match="ties them"):
        load(write(one, {SINGLE: content | {HEAD: content[EMBED] + 1}}), layout(), CPU)


def test_strict_about_tensors(tmp_path: Path) -> None:
    """V1: missing, unexpected, misshapen, of no float type: named."""
    content = tensors()
    for changed, message in (
        ({name: tensor for name, tensor in content.items() if name != Q}, f"lacks tensors: {Q}"),
        (content | {"surprise": torch.zeros(1)}, "unexpected tensor surprise"),
        (content | {Q: content[Q][:-1].clone()}, "shape"),
        (content | {Q: content[Q].to(torch.int32)}, "int32"),
    ):
        with pytest.raises(WeightsError, match=message):
            load(write(tmp_path, {SINGLE: changed}), layout(), CPU)


def test_strict_about_files(tmp_path: Path) -> None:
    """V1: no file, a cut one, garbage, an index that lies, points outside, or names a tensor twice."""
    with pytest.raises(WeightsError, match="neither"):
        load(tmp_path, layout(), CPU)
    path = write(tmp_path, {SINGLE: tensors()}) / SINGLE
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(WeightsError, match="can't be read"):
        load(tmp_path, layout(), CPU)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(WeightsError, match="can't be read"):
        load(tmp_path, layout(), CPU)
    content = tensors()
    for index, message in (
        (dict.fromkeys(content, "../a.safetensors"), "which isn't in"),
        ({name: "a.safetensors" for name in content if name != Q}, "disagree"),
        (dict.fromkeys(content, "gone.safetensors"), "which isn't in"),
    ):
        with pytest.raises(WeightsError, match=message):
            load(write(tmp_path, {"a.safetensors": content}, index), layout(), CPU)
    parts = {"a.safetensors": content, "b.safetensors": {Q: content[Q]}}
    index = dict.fromkeys(content, "a.safetensors")
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(WeightsError, match="no safetensors index"):
        load(write(tmp_path, parts), layout(), CPU)
    index[Q] = "b.safetensors"
    with pytest.raises(WeightsError, match="twice|disagree"):
        load(write(tmp_path, parts, index), layout(), CPU)
