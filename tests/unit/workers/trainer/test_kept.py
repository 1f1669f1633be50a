"""Kept versions: exact, complete or not there, and every changed byte of a file is found."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.tiny_model import tiny_spec, tiny_weights
from torch import Tensor
from unison.engine.models.layout import WeightLayout
from unison.ipc.errors import CheckpointError, ConfigError
from unison.ipc.types import PolicyVersion
from unison.workers.trainer.config import CheckpointConfig, TrainConfig
from unison.workers.trainer.kept import (
    FOLDER,
    DamagedVersionError,
    KeptVersion,
    VersionKeeper,
    apply,
    arrays_of,
    kept_versions,
    read_header,
)

DTYPES = (torch.bfloat16, torch.float32)


def layout_of(dtype: torch.dtype = torch.bfloat16, is_tied: bool = True) -> WeightLayout:
    return WeightLayout(tiny_spec(tie_word_embeddings=is_tied), dtype)


def version(layout: WeightLayout, ordinal: int, tensors: dict[str, Tensor]) -> PolicyVersion:
    return PolicyVersion(ordinal, layout.manifest(tensors).digest)


def history(layout: WeightLayout, count: int) -> list[dict[str, Tensor]]:
    """Weight sets as a run makes them: each moves a part of the elements of the one before."""
    sets = [tiny_weights(layout.spec, 0, layout.dtype)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        views = layout.views(layout.allocate())
        for name in layout.entries:
            noise = torch.randn(views[name].shape, generator=generator) * 1e-3
            views[name].copy_(sets[-1][name] + noise * (noise.abs() > 1.5e-3))
        sets.append(views)
    return sets


def keep_all(run_dir: Path, layout: WeightLayout, sets: list[dict[str, Tensor]], interval: int = 1) -> VersionKeeper:
    keeper = VersionKeeper(run_dir, interval, layout)
    keeper.begin(version(layout, 0, sets[0]), sets[0], is_first=True)
    for step, tensors in enumerate(sets[1:], 1):
        keeper.keep(step, version(layout, step, tensors), tensors)
    return keeper


def by_step(run_dir: Path) -> dict[int, KeptVersion]:
    found, damaged = kept_versions(run_dir)
    assert not damaged
    return {kept.step: kept for kept in found}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_every_version_comes_back(dtype: torch.dtype, is_tied: bool, tmp_path: Path) -> None:
    """V1: forwards from the first weights and backwards from the last, bit for bit; files are small differences."""
    layout = layout_of(dtype, is_tied)
    sets = history(layout, 3)
    keep_all(tmp_path, layout, sets)
    kept = by_step(tmp_path)
    digests = [layout.manifest(tensors).digest for tensors in sets]
    assert [(kept[step].digest, kept[step].base) for step in (1, 2, 3)] == list(zip(digests[1:], digests, strict=False))
    work = layout.views(layout.allocate())
    for name in layout.entries:
        work[name].copy_(sets[0][name])
    arrays = arrays_of(layout, work)
    for step in (1, 2, 3):
        apply(kept[step], arrays)
        assert layout.manifest(work).digest == digests[step]
    for step in (3, 2, 1):
        apply(kept[step], arrays)
        assert layout.manifest(work).digest == digests[step - 1]
    assert all(each.path.stat().st_size < layout.num_bytes / 3 for each in kept.values())


def test_the_rule(tmp_path: Path) -> None:
    """P50: none, all, or every N-th step; a difference is to the version kept before; anything else is refused."""
    layout = layout_of()
    sets = history(layout, 5)
    keep_all(tmp_path / "none", layout, sets, CheckpointConfig().keep_interval)
    assert not (tmp_path / "none").exists()
    (tmp_path / "two").mkdir()
    keep_all(tmp_path / "two", layout, sets, CheckpointConfig(keep_versions="every:2").keep_interval)
    kept = by_step(tmp_path / "two")
    assert set(kept) == {2, 4} and kept[4].base == kept[2].digest and kept[2].base == layout.manifest(sets[0]).digest
    assert CheckpointConfig(keep_versions="all").keep_interval == 1
    for rule in ("every:0", "every", "every:-1", "some", ""):
        with pytest.raises(ConfigError) as caught:
            TrainConfig.from_dict({"checkpoint": {"keep_versions": rule}})
        assert caught.value.field == "checkpoint.keep_versions"


def test_a_resumed_run_keeps_what_it_begins_with(tmp_path: Path) -> None:
    """P28: weights that nothing else will have are kept whole; those kept before, or the model's own, aren't again."""
    layout = layout_of()
    sets = history(layout, 3)
    keep_all(tmp_path, layout, sets[:2])
    known = VersionKeeper(tmp_path, 1, layout)
    known.begin(version(layout, 7, sets[1]), sets[1], is_first=False)
    assert len(kept_versions(tmp_path)[0]) == 1
    unknown = VersionKeeper(tmp_path, 1, layout)
    unknown.begin(version(layout, 8, sets[2]), sets[2], is_first=False)
    whole = {kept.digest: kept for kept in kept_versions(tmp_path)[0]}[layout.manifest(sets[2]).digest]
    assert whole.base is None
    work = layout.views(layout.allocate())
    apply(whole, arrays_of(layout, work))
    assert layout.manifest(work).digest == whole.digest
    assert unknown.keep(9, version(layout, 9, sets[3]), sets[3]) == (
        tmp_path / FOLDER / f"{layout.manifest(sets[3]).digest}.version"
    ).stat().st_size
    assert unknown.keep(10, version(layout, 10, sets[3]), sets[3]) == 0, "equal weights are kept once"


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    """P13: in the header, in a tensor's stream, in the digest, and where the file is cut off; the tensor is named."""
    layout = layout_of()
    sets = history(layout, 1)
    keep_all(tmp_path, layout, sets)
    (kept,) = by_step(tmp_path).values()
    content = kept.path.read_bytes()
    start = content.index(b"]]}") + 3
    tensor = kept.own[0].name
    generator = np.random.default_rng(0)
    places = [0, 9, 20, start - 5, start + 3, len(content) - 3]
    places += [int(place) for place in generator.integers(0, len(content), 80)]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(generator.integers(0, 8))
        kept.path.write_bytes(damaged)
        with pytest.raises(DamagedVersionError, match=str(kept.path)) as caught:
            _rebuild(kept.path, layout, sets[0])
        assert place != start + 3 or caught.value.tensor == tensor
    for length in (0, 4, 15, start - 1, start, len(content) - 1):
        kept.path.write_bytes(content[:length])
        with pytest.raises(DamagedVersionError):
            _rebuild(kept.path, layout, sets[0])
    kept.path.unlink()
    with pytest.raises(DamagedVersionError):
        apply(kept, arrays_of(layout, sets[0]))
    kept.path.write_bytes(content)
    _rebuild(kept.path, layout, sets[0])


def _rebuild(path: Path, layout: WeightLayout, base: dict[str, Tensor]) -> None:
    work = layout.views(layout.allocate())
    for name in layout.entries:
        work[name].copy_(base[name])
    apply(read_header(path), arrays_of(layout, work))


def test_what_a_kill_has_left_is_not_there(tmp_path: Path) -> None:
    """P3: a file under its temporary name is none, and makes room for the next."""
    layout = layout_of()
    sets = history(layout, 1)
    digest = layout.manifest(sets[1]).digest
    (tmp_path / FOLDER).mkdir()
    left = tmp_path / FOLDER / f".writing-{digest}.version"
    left.write_bytes(b"half")
    assert kept_versions(tmp_path) == ([], [])
    keep_all(tmp_path, layout, sets)
    assert [kept.digest for kept in kept_versions(tmp_path)[0]] == [digest] and not left.exists()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """P13: an error that says which file and what to do; nothing is left behind. So where the bytes aren't those that
    were published."""
    layout = layout_of()
    sets = history(layout, 1)
    (tmp_path / FOLDER).write_text("a file")
    with pytest.raises(CheckpointError, match=r"can't be written.*keep_versions=none"):
        keep_all(tmp_path, layout, sets)
    os.unlink(tmp_path / FOLDER)
    keeper = VersionKeeper(tmp_path, 1, layout)
    keeper.begin(version(layout, 0, sets[0]), sets[0], is_first=True)
    with pytest.raises(CheckpointError, match="changed while they were kept"):
        keeper.keep(1, PolicyVersion(1, "0" * 32), sets[1])
    assert kept_versions(tmp_path) == ([], [])
