"""Checkpoints: a Hugging Face directory that transformers loads, and beside it what a run needs to go on.

    RUN/checkpoints/step-00000020/
        model.safetensors config.json tokenizer …    the published weights, rounded as they were served
        trainer/optimizer.safetensors                float32 masters and moments
        trainer/state.json                           step, version, schedule, cursor
        digests.json                                 xxh3-128 of every file above, written last

A checkpoint is complete or not there: it is written under a temporary name, every file and folder is synced, and one
rename makes it visible (rename(2), fsync(2)). Loading compares every digest first.

Owns: the format, retention. Called by the training loop.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ...ipc.errors import CheckpointError
from ...ipc.types import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

FOLDER, PREFIX, TEMPORARY = "checkpoints", "step-", ".writing-"
DIGESTS, STATE, OPTIMIZER = "digests.json", "trainer/state.json", "trainer/optimizer.safetensors"
FORMAT = 1
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json")
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class TrainState:
    """What a run needs besides weights and moments to go on."""

    step: int
    """Training steps done."""
    ordinal: int
    """Of the version that step made."""
    digest: str
    """Of its weights, as published."""
    optimizer: dict[str, Any]
    """`PolicyOptimizer.scalars`."""
    seed: int
    """The run's; draws and the order of prompts follow from it and the cursor."""
    next_order_id: int
    """The cursor: first training order that wasn't issued."""
    base_model: str
    """Directory that the run began with: reference policy, tokenizer, configuration."""
    format: int = FORMAT
    """Of this record."""

    @property
    def version(self) -> PolicyVersion:
        """The version that the checkpoint holds."""
        return PolicyVersion(self.ordinal, self.digest)


def write_checkpoint(
    run_dir: Path, state: TrainState, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], keep: int
) -> Path:
    """Write one, make it visible, remove all but the newest `keep`; returns its directory.

    `weights` by Hugging Face name, tied aliases left out. A checkpoint of the same step is replaced.

    Raises:
        CheckpointError: the disk is full, or can't be written.
    """
    # Whoever only looks at checkpoints needs no torch.
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    folder = run_dir / FOLDER
    final = folder / f"{PREFIX}{state.step:08d}"
    temporary = folder / f"{TEMPORARY}{final.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "trainer").mkdir(parents=True)
        _copy_companions(Path(state.base_model), temporary)
        _name_dtype(temporary / "config.json", str(next(iter(weights.values())).dtype).removeprefix("torch."))
        save_file(dict(weights), temporary / "model.safetensors", metadata={"format": "pt"})
        save_file(dict(optimizer), temporary / OPTIMIZER)
        (temporary / STATE).write_text(json.dumps(asdict(state), indent=2))
        digests = {name: _digest(temporary / name) for name in _files(temporary)}
        (temporary / DIGESTS).write_text(json.dumps(digests, indent=2))
        for name in (*_files(temporary), "trainer", "."):
            sync(temporary / name)
        old = folder / f"{TEMPORARY}old"
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        sync(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{final} can't be written: {error}; make room, and go on from the one before with --resume"
        ) from error
    for directory in checkpoints(run_dir)[:-keep]:
        shutil.rmtree(directory, ignore_errors=True)
    return final


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(path for path in (run_dir / FOLDER).glob(f"{PREFIX}*") if (path / DIGESTS).is_file())


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint whose every byte is what its digests say; None where a run has written none yet.

    Raises:
        CheckpointError: there are some, and none is whole. To begin anew then would be to throw the run away.
    """
    found = checkpoints(run_dir)
    for directory in reversed(found):
        try:
            verify(directory)
        except CheckpointError as error:
            log.warning("checkpoint skipped", extra={"reason": str(error)})
            continue
        return directory
    if found:
        raise CheckpointError(
            f"none of the {len(found)} checkpoints in {run_dir / FOLDER} is what its digests say; put one back as it "
            f"was, or remove {FOLDER} to begin this run anew from its first weights"
        )
    return None


def verify(directory: Path) -> None:
    """Compare every file with its digest. Other files are none of ours, unless a loader would take them for weights.

    Raises:
        CheckpointError: a file is missing or changed, or there are weights too many.
    """
    try:
        digests = json.loads((directory / DIGESTS).read_text())
        names = [name for name in _files(directory) if name in digests or name.endswith(_WEIGHT_SUFFIXES)]
        found = {name: _digest(directory / name) for name in names}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} can't be read: {error}") from error
    if not isinstance(digests, dict):
        raise CheckpointError(f"{directory / DIGESTS} isn't an object")
    wrong = sorted(name for name in {*digests, *found} if digests.get(name) != found.get(name))
    if wrong:
        raise CheckpointError(f"{directory} isn't what its digests say: {', '.join(wrong[:8])}")


def read_state(directory: Path) -> TrainState:
    """The record of a checkpoint.

    Raises:
        CheckpointError: it can't be read, or is of another format.
    """
    try:
        state = TrainState(**json.loads((directory / STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{directory / STATE} can't be read: {error}") from error
    if state.format != FORMAT:
        raise CheckpointError(f"{directory} has format {state.format}; this version of unison reads {FORMAT}")
    return state


def read_optimizer(directory: Path) -> dict[str, Tensor]:
    """Masters and moments, mapped from the file."""
    from safetensors import safe_open  # noqa: PLC0415 - as above

    with safe_open(directory / OPTIMIZER, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def _copy_companions(source: Path, target: Path) -> None:
    """Configuration, tokenizer, chat template: every plain file of the base model but its weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHT_SUFFIXES):
            if path.name != DIGESTS:
                shutil.copyfile(path, target / path.name)


def _name_dtype(config: Path, dtype: str) -> None:
    """Have the configuration say what the weights are: transformers rounds them to it."""
    values = json.loads(config.read_text())
    values.pop("torch_dtype", None)  # its older name
    config.write_text(json.dumps(values | {"dtype": dtype}, indent=2))


def _files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have a file, or a folder's names, on the disk when this returns (fsync(2))."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
