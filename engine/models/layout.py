"""WeightLayout: where every parameter lies in one flat run of bytes, and the views on it.

Owns: the order and offsets of parameters; that fused matrices (q/k/v, gate/up) and Hugging Face names are views of the
same bytes; the manifest. Knows nothing of files or of who writes the bytes. Used by the loader, the engine, the
trainer.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ...ipc.errors import WeightsError
from ...ipc.types import Manifest, TensorEntry
from .spec import ModelSpec

ALIGNMENT_BYTES = 64
"""Every fused group starts at a multiple of it: one cache line."""
_HUGE_PAGE_BYTES = 2 << 20
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Entry:
    """One parameter's place."""

    shape: tuple[int, ...]
    """Elements per dimension."""
    offset: int
    """First element, counted in elements from the start of the flat vector."""


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One decoder layer; fused matrices hold their parts row below row."""

    input_norm: Tensor
    """[hidden]."""
    qkv: Tensor
    """[(H + 2 Hk) D, hidden]."""
    qkv_bias: Tensor | None
    """[(H + 2 Hk) D]."""
    q_norm: Tensor | None
    """[D]."""
    k_norm: Tensor | None
    """[D]."""
    o: Tensor
    """[hidden, H D]."""
    o_bias: Tensor | None
    """[hidden]."""
    post_norm: Tensor
    """[hidden]."""
    gate_up: Tensor
    """[2 intermediate, hidden]."""
    gate_up_bias: Tensor | None
    """[2 intermediate]."""
    down: Tensor
    """[hidden, intermediate]."""
    down_bias: Tensor | None
    """[hidden]."""


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """A weight set as the decoder reads it: views, never copies."""

    embedding: Tensor
    """[vocabulary, hidden]."""
    layers: tuple[LayerWeights, ...]
    """One per decoder layer."""
    norm: Tensor
    """[hidden]."""
    head: Tensor
    """[vocabulary, hidden]; the embedding itself when tied."""


class WeightLayout:
    """The flat layout of one model in one dtype.

    Invariant: parts of a fused group follow each other without a gap, in the order in which the fused matrix has them.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self.spec = spec
        self.dtype = dtype
        self.entries: dict[str, Entry] = {}
        self.aliases: dict[str, str] = {HEAD: EMBEDDING} if spec.is_tied else {}
        self._groups: dict[str, tuple[str, ...]] = {}
        self._end = 0
        self._fill()
        self.num_elements = self._end
        self.num_bytes = self._end * dtype.itemsize

    def _fill(self) -> None:
        spec = self.spec
        hidden, inter, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
        q, kv = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
        self._add(EMBEDDING, (spec.vocab_size, hidden))
        for index in range(spec.num_layers):
            layer, attention = f"model.layers.{index}.", f"model.layers.{index}.self_attn."
            projections = tuple(f"{attention}{name}_proj" for name in "qkv")
            mlp = tuple(f"{layer}mlp.{name}_proj" for name in ("gate", "up"))
            self._add(f"{layer}input_layernorm.weight", (hidden,))
            self._add_group(f"{layer}qkv", projections, ".weight", ((q, hidden), (kv, hidden), (kv, hidden)))
            if spec.qkv_bias:
                self._add_group(f"{layer}qkv_bias", projections, ".bias", ((q,), (kv,), (kv,)))
            if spec.qk_norm:
                self._add(f"{attention}q_norm.weight", (head_dim,))
                self._add(f"{attention}k_norm.weight", (head_dim,))
            self._add(f"{attention}o_proj.weight", (hidden, q))
            if spec.o_bias:
                self._add(f"{attention}o_proj.bias", (hidden,))
            self._add(f"{layer}post_attention_layernorm.weight", (hidden,))
            self._add_group(f"{layer}gate_up", mlp, ".weight", ((inter, hidden), (inter, hidden)))
            if spec.mlp_bias:
                self._add_group(f"{layer}gate_up_bias", mlp, ".bias", ((inter,), (inter,)))
            self._add(f"{layer}mlp.down_proj.weight", (hidden, inter))
            if spec.mlp_bias:
                self._add(f"{layer}mlp.down_proj.bias", (hidden,))
        self._add("model.norm.weight", (hidden,))
        if not spec.is_tied:
            self._add(HEAD, (spec.vocab_size, hidden))

    def _add(self, name: str, shape: tuple[int, ...], align: bool = True) -> None:
        unit = ALIGNMENT_BYTES // self.dtype.itemsize if align else 1
        offset = -(-self._end // unit) * unit
        self.entries[name] = Entry(shape, offset)
        self._end = offset + prod(shape)

    def _add_group(self, fused: str, parts: tuple[str, ...], suffix: str, shapes: tuple[tuple[int, ...], ...]) -> None:
        names = tuple(part + suffix for part in parts)
        for index, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            self._add(name, shape, align=index == 0)
        self._groups[fused] = names

    # ---- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, device: torch.device | str = "cpu") -> Tensor:
        """A new flat vector of `num_elements`, zeroed: on a CPU one mapping of its own that asks for huge pages."""
        with torch.inference_mode(False), torch.no_grad():
            if torch.device(device).type != "cpu":
                return torch.zeros(self.num_elements, dtype=self.dtype, device=device)
            mapping = mmap.mmap(-1, self.num_bytes + _HUGE_PAGE_BYTES)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                mapping.madvise(mmap.MADV_HUGEPAGE)
            whole = torch.frombuffer(mapping, dtype=torch.uint8)
            start = -whole.data_ptr() % _HUGE_PAGE_BYTES
            return whole[start : start + self.num_bytes].view(self.dtype)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Hugging Face names → views of `flat` [num_elements], aliases included; keeps autograd.

        Raises:
            WeightsError: `flat` has another length or dtype.
        """
        if flat.shape != (self.num_elements,) or flat.dtype is not self.dtype:
            raise WeightsError(
                f"a flat vector of {flat.dtype} {tuple(flat.shape)} was given; "
                f"this layout has ({self.num_elements},) of {self.dtype}"
            )
        views = {name: flat[e.offset : e.offset + prod(e.shape)].view(e.shape) for name, e in self.entries.items()}
        return views | {alias: views[name] for alias, name in self.aliases.items()}

    def pack(self, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Copy tensors from anywhere into a new flat vector and return its views; names, shapes and dtypes are
        checked."""
        self._check(tensors)
        views = self.views(self.allocate(device))
        with torch.no_grad():
            for name in self.entries:
                views[name].copy_(tensors[name])
            for alias, name in self.aliases.items():
                if alias in tensors and not torch.equal(tensors[alias].to(self.dtype), tensors[name].to(self.dtype)):
                    raise WeightsError(f"{alias} differs from {name}, but the configuration ties them")
        return views

    # ---- binding -----------------------------------------------------------------------------------------------------

    def bind(self, tensors: Mapping[str, Tensor]) -> DecoderWeights:
        """The decoder's view of a weight set, straight off the given storage.

        Raises:
            WeightsError: a tensor is missing, unexpected, of a wrong shape, dtype or device, or fused parts aren't
                neighbours in one storage (`pack` brings any tensors into this layout).
        """
        self._check(tensors)
        own = dict(tensors)
        for alias, name in self.aliases.items():
            if alias in own and own[alias].data_ptr() != own[name].data_ptr():
                raise WeightsError(f"{alias} is tied to {name}, but lies elsewhere; pass one tensor under both names")
        fused = {group: self._fuse(group, own) for group in self._groups}
        layers = tuple(self._layer(f"model.layers.{index}.", own, fused) for index in range(self.spec.num_layers))
        head = own[EMBEDDING] if self.spec.is_tied else own[HEAD]
        return DecoderWeights(own[EMBEDDING], layers, own["model.norm.weight"], head)

    def _layer(self, layer: str, own: Mapping[str, Tensor], fused: Mapping[str, Tensor]) -> LayerWeights:
        attention = f"{layer}self_attn."
        return LayerWeights(
            input_norm=own[f"{layer}input_layernorm.weight"],
            qkv=fused[f"{layer}qkv"],
            qkv_bias=fused.get(f"{layer}qkv_bias"),
            q_norm=own.get(f"{attention}q_norm.weight"),
            k_norm=own.get(f"{attention}k_norm.weight"),
            o=own[f"{attention}o_proj.weight"],
            o_bias=own.get(f"{attention}o_proj.bias"),
            post_norm=own[f"{layer}post_attention_layernorm.weight"],
            gate_up=fused[f"{layer}gate_up"],
            gate_up_bias=fused.get(f"{layer}gate_up_bias"),
            down=own[f"{layer}mlp.down_proj.weight"],
            down_bias=own.get(f"{layer}mlp.down_proj.bias"),
        )

    def _fuse(self, group: str, own: Mapping[str, Tensor]) -> Tensor:
        """One matrix over neighbouring parts: a view of their base vector, so that autograd sees one parameter."""
        parts = [own[name] for name in self._groups[group]]
        first = parts[0]
        storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
        end = start
        for name, part in zip(self._groups[group], parts, strict=True):
            if part.untyped_storage().data_ptr() != storage or part.storage_offset() != end:
                raise WeightsError(
                    f"{name} doesn't follow its neighbour in memory, so {group} can't be read without a copy; "
                    "lay the tensors out with WeightLayout.pack"
                )
            end += part.numel()
        shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
        base = first._base if first._base is not None else first
        if base.ndim == 1 and base.storage_offset() <= start and base.is_contiguous():
            offset = start - base.storage_offset()
            return base[offset : offset + end - start].view(shape)
        return first.as_strided(shape, first.stride(), start)

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        if missing := sorted(set(self.entries) - set(tensors)):
            raise WeightsError(f"missing tensors: {', '.join(missing[:8])}{' …' if len(missing) > 8 else ''}")
        if unexpected := sorted(set(tensors) - set(self.entries) - set(self.aliases)):
            raise WeightsError(f"unexpected tensors: {', '.join(unexpected[:8])}{' …' if len(unexpected) > 8 else ''}")
        device = tensors[EMBEDDING].device
        for name, tensor in tensors.items():
            shape = self.entries[self.aliases.get(name, name)].shape
            if tuple(tensor.shape) != shape:
                raise WeightsError(f"{name} has shape {tuple(tensor.shape)}; the configuration asks for {shape}")
            if tensor.dtype is not self.dtype:
                raise WeightsError(f"{name} is {tensor.dtype}; this layout is {self.dtype}")
            if tensor.device != device or not tensor.is_contiguous():
                raise WeightsError(
                    f"{name} is on {tensor.device} or not contiguous; all tensors lie contiguous on {device}"
                )

    # ---- attestation -------------------------------------------------------------------------------------------------

    def manifest(self, tensors: Mapping[str, Tensor]) -> Manifest:
        """Name, shape, dtype and hash of every tensor, tied ones as aliases (V1)."""
        dtype = str(self.dtype).removeprefix("torch.")
        entries = {
            name: TensorEntry.of(name, entry.shape, dtype, _bytes_of(tensors[name]))
            for name, entry in self.entries.items()
        }
        tied = (
            TensorEntry(alias, entries[name].shape, dtype, entries[name].digest, name)
            for alias, name in self.aliases.items()
        )
        return Manifest.of((*entries.values(), *tied))


def _bytes_of(tensor: Tensor) -> memoryview:
    host = tensor.detach().cpu().contiguous()
    return host.view(torch.uint8).numpy().data.cast("B")
