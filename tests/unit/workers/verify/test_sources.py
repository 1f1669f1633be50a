"""Weights by digest: every way that leads there is found, none that doesn't is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.tiny_directory import write_tiny_directory
from harness.tiny_model import tiny_spec
from torch import Tensor
from unison.engine.models.layout import DecoderWeights, WeightLayout
from unison.ipc.types import PolicyVersion
from unison.workers.trainer.kept import VersionKeeper, path_of
from unison.workers.verify.sources import MAX_RESIDENT, DamagedWeightsError, MissingWeightsError, WeightSources

LAYOUT = WeightLayout(tiny_spec(), torch.bfloat16)


def digest_of(tensors: dict[str, Tensor]) -> str:
    return LAYOUT.manifest(tensors).digest


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, list[str]]:
    """A model's directory, and a run that has kept five versions made from it: (folder of both, digests)."""
    sets = [LAYOUT.pack(write_tiny_directory(tmp_path / "model"))]
    for seed in range(5):
        noise = torch.Generator().manual_seed(seed)
        sets.append({name: (tensor + 0.01 * torch.randn(tensor.shape, generator=noise)).to(tensor.dtype)
                     for name, tensor in sets[-1].items() if name in LAYOUT.entries})  # fmt: skip
        sets[-1] = LAYOUT.pack(sets[-1])
    keeper = VersionKeeper(tmp_path, 1, LAYOUT)
    keeper.begin(PolicyVersion(0, digest_of(sets[0])), sets[0], is_first=True)
    for step, tensors in enumerate(sets[1:], 1):
        keeper.keep(step, PolicyVersion(step, digest_of(tensors)), tensors)
    return tmp_path, [digest_of(tensors) for tensors in sets]


def sources(folder: Path, *directories: tuple[str, str | None]) -> WeightSources:
    made = WeightSources(LAYOUT)
    for name, digest in directories:
        made.add_directory(folder / name, digest)
    made.add_run(folder)
    return made


def assert_has(made: WeightSources, digest: str) -> None:
    assert isinstance(made.prepare([digest])[digest], DecoderWeights)
    assert made.manifest(digest).digest == digest


def test_forwards_backwards_and_in_any_order(run: tuple[Path, list[str]]) -> None:
    """V1: whatever is asked for first, each comes out with its own digest; few sets stay in memory."""
    folder, digests = run
    made = sources(folder, ("model", digests[0]))
    for place in (3, 5, 0, 4, 1, 2, 5):
        assert_has(made, digests[place])
        assert len(made._resident) <= MAX_RESIDENT
    found = made.prepare(digests)
    assert all(isinstance(each, DecoderWeights) for each in found.values()), "as many as one request needs"
    made.prepare(digests[:1])
    assert not made.damaged


def test_a_directory_that_nobody_has_spoken_for(run: tuple[Path, list[str]]) -> None:
    """Its weights are read where nothing else leads there, and it may be what a version is reached from."""
    folder, digests = run
    assert_has(sources(folder, ("model", None)), digests[4])


def test_from_the_newest_back(run: tuple[Path, list[str]], tmp_path: Path) -> None:
    """XOR is its own inverse: with the model gone, a later version leads to the earlier ones."""
    folder, digests = run
    made = sources(folder, ("model", digests[0]))
    made.prepare([digests[5]])
    views = {name: view.clone() for name, view in made._resident[digests[5]].views.items() if name in LAYOUT.entries}
    from safetensors.torch import save_file

    save_file(views, folder / "model" / "model.safetensors")
    later = sources(folder, ("model", digests[5]))
    for place in (0, 2):
        assert_has(later, digests[place])


def test_what_is_nowhere(run: tuple[Path, list[str]]) -> None:
    """Missing isn't damaged: an unknown digest, a link of the chain that was deleted, no directory at all."""
    folder, digests = run
    assert isinstance(sources(folder, ("model", digests[0])).prepare(["0" * 32])["0" * 32], MissingWeightsError)
    path_of(folder / "versions", digests[3]).unlink()
    made = sources(folder, ("model", digests[0]))
    found = made.prepare(digests)
    assert [isinstance(found[each], DecoderWeights) for each in digests] == [True, True, True, False, False, False]
    assert all(isinstance(found[each], MissingWeightsError) for each in digests[3:]) and not made.damaged
    assert isinstance(sources(folder).prepare(digests[:1])[digests[0]], MissingWeightsError)


def test_what_is_damaged(run: tuple[Path, list[str]]) -> None:
    """P13: a file with another byte, and a directory with other weights than it is said to have, are named."""
    folder, digests = run
    path = path_of(folder / "versions", digests[2])
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    made = sources(folder, ("model", digests[0]))
    found = made.prepare(digests)
    assert [isinstance(found[each], DecoderWeights) for each in digests] == [True, True, False, False, False, False]
    assert all(isinstance(found[each], DamagedWeightsError) and str(path) in str(found[each]) for each in digests[2:])
    assert list(made.damaged) == [str(path)]
    write_tiny_directory(folder / "model", seed=9)
    made = sources(folder, ("model", digests[0]))
    for place in (1, 0):
        assert "is said to have" in str(made.prepare([digests[place]])[digests[place]])
    assert str(folder / "model") in made.damaged
