"""Loader: safetensors files into one flat weight set, strictly.

Owns: reading a Hugging Face directory's tensors, each used exactly once. Knows nothing of the decoder. Source of the
format: the safetensors specification (8-byte header length, JSON header, data).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...ipc.errors import WeightsError
from .layout import WeightLayout

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry; the decoder computes them from the configuration."""


def load(directory: Path, layout: WeightLayout, device: torch.device) -> dict[str, Tensor]:
    """Read every parameter into a new flat vector of `layout`, as `load_into` does."""
    views = layout.views(layout.allocate(device))
    load_into(directory, layout, views)
    return views


def load_into(directory: Path, layout: WeightLayout, views: dict[str, Tensor]) -> None:
    """Read every parameter into its view; floats of another width are rounded to the layout's dtype.

    Raises:
        WeightsError: a file or tensor is missing, unexpected, misshapen, damaged, there twice, or of no float type; a
            tied tensor that is stored as well differs from its twin.
    """
    seen: set[str] = set()
    for path, expected in _files(directory):
        names = _read(path, layout, views, seen)
        if expected is not None and names != expected:
            raise WeightsError(f"{path.name} and {INDEX} disagree about {sorted(names ^ expected)[:8]}")
    if missing := sorted(set(layout.entries) - seen):
        raise WeightsError(f"{directory} lacks tensors: {', '.join(missing[:8])}{' …' if len(missing) > 8 else ''}")


def _files(directory: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Files to read, each with the names that the index promises in it (None without an index)."""
    index = directory / INDEX
    if not index.exists():
        if not (directory / SINGLE).exists():
            raise WeightsError(f"{directory} has neither {SINGLE} nor {INDEX}; other formats aren't read")
        yield directory / SINGLE, None
        return
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{index} is no safetensors index: {error!r}") from error
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or not (directory / file).exists():
            raise WeightsError(f"{index} names the file {file!r}, which isn't in {directory}")
        yield directory / file, {name for name, own in weight_map.items() if own == file}


def _read(path: Path, layout: WeightLayout, views: dict[str, Tensor], seen: set[str]) -> set[str]:
    """Copy one file's tensors to their places; returns the names in it."""
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name in sorted(names, key=lambda name: (name in layout.aliases, name)):
                if not name.endswith(_IGNORED_SUFFIXES):
                    _place(name, file.get_tensor(name), path, layout, views, seen)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} can't be read as safetensors: {error}") from error
    return names


def _place(
    name: str, tensor: Tensor, path: Path, layout: WeightLayout, views: dict[str, Tensor], seen: set[str]
) -> None:
    if name not in views:
        raise WeightsError(f"{path.name} has the unexpected tensor {name}")
    if name in seen:
        raise WeightsError(f"{name} is there twice; the second time in {path.name}")
    target = views[name]
    if tensor.shape != target.shape:
        raise WeightsError(
            f"{name} has shape {tuple(tensor.shape)} in {path.name}; the configuration asks for {tuple(target.shape)}"
        )
    if tensor.dtype not in _FLOATS:
        raise WeightsError(f"{name} is {tensor.dtype} in {path.name}; read are float32, bfloat16 and float16")
    seen.add(name)
    with torch.no_grad():
        twin = layout.aliases.get(name)
        if twin is None:
            target.copy_(tensor)
        elif twin in seen and not torch.equal(target, tensor.to(target.device, target.dtype)):
            raise WeightsError(f"{name} differs from {twin}, but the configuration ties them")
        elif twin not in seen:
            raise WeightsError(
                f"{name} is stored before its twin {twin}; keep tied tensors in one file, or store one of them"
            )
