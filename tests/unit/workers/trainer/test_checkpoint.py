"""Checkpoints: complete or not there, and what their digests say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.tiny_directory import write_tiny_chat_directory
from unison.ipc.errors import CheckpointError
from unison.workers.trainer.checkpoint import (
    TrainState,
    checkpoints,
    latest_checkpoint,
    read_optimizer,
    read_state,
    verify,
    write_checkpoint,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_chat_directory(directory)
    return directory


def write(run_dir: Path, model: Path, step: int, keep: int = 2) -> Path:
    state = TrainState(step, step, f"d{step}", {"num_steps": step}, 0, 10 * step, str(model))
    weights = {"w": torch.full((4,), float(step), dtype=torch.bfloat16)}
    return write_checkpoint(run_dir, state, weights, {"master.w": torch.full((4,), float(step))}, keep)


def test_round_trip(tmp_path: Path, model: Path) -> None:
    """State, masters and the base model's companions are there; its old weights aren't."""
    path = write(tmp_path, model, 3)
    verify(path)
    assert latest_checkpoint(tmp_path) == path and read_state(path).next_order_id == 30
    assert read_state(path).version.ordinal == 3
    assert torch.equal(read_optimizer(path)["master.w"], torch.full((4,), 3.0))
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {item.name for item in path.iterdir()}


def test_retention_and_replacement(tmp_path: Path, model: Path) -> None:
    """The newest stay; the same step is replaced; nothing temporary is left."""
    for step in (1, 2, 3, 3):
        write(tmp_path, model, step)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize(
    "name", ["model.safetensors", "trainer/optimizer.safetensors", "trainer/state.json", "config.json"]
)
def test_a_changed_byte_is_found(tmp_path: Path, model: Path, name: str) -> None:
    """A damaged checkpoint is refused by name, and the one before is taken."""
    old, new = write(tmp_path, model, 1), write(tmp_path, model, 2)
    content = bytearray((new / name).read_bytes())
    content[-1] ^= 1
    (new / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        verify(new)
    assert latest_checkpoint(tmp_path) == old


def test_what_is_not_complete_is_not_there(tmp_path: Path, model: Path) -> None:
    """P13: a folder that was being written, one without digests, and an empty run."""
    assert latest_checkpoint(tmp_path) is None
    path = write(tmp_path, model, 1)
    path.rename(path.with_name(".writing-step-00000001"))
    assert latest_checkpoint(tmp_path) is None
    path = write(tmp_path, model, 2)
    (path / "digests.json").unlink()
    assert checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="can't be read"):
        verify(path)
    (path / "trainer/state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="can't be read"):
        read_state(path)


def test_a_place_that_cannot_be_written(tmp_path: Path, model: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="can't be written"):
        write(tmp_path, model, 1)
