"""Checkpoints: complete or not there, and what their digests say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
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


def write(run_dir: Path, chat_model: Path, step: int, keep: int = 2) -> Path:
    state = TrainState(step, step, f"d{step}", {"num_steps": step}, 0, 10 * step, str(chat_model))
    weights = {"w": torch.full((4,), float(step), dtype=torch.bfloat16)}
    return write_checkpoint(run_dir, state, weights, {"master.w": torch.full((4,), float(step))}, keep)


def test_round_trip(tmp_path: Path, chat_model: Path) -> None:
    """State, masters and the base model's companions are there; its old weights aren't."""
    path = write(tmp_path, chat_model, 3)
    verify(path)
    assert latest_checkpoint(tmp_path) == path and read_state(path).next_order_id == 30
    assert read_state(path).version.ordinal == 3
    assert torch.equal(read_optimizer(path)["master.w"], torch.full((4,), 3.0))
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {item.name for item in path.iterdir()}


def test_retention_and_replacement(tmp_path: Path, chat_model: Path) -> None:
    """The newest stay; the same step is replaced; nothing temporary is left."""
    for step in (1, 2, 3, 3):
        write(tmp_path, chat_model, step)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize(
    "name", ["model.safetensors", "trainer/optimizer.safetensors", "trainer/state.json", "config.json"]
)
def test_a_changed_byte_is_found(tmp_path: Path, chat_model: Path, name: str) -> None:
    """A damaged checkpoint is refused by name, and the one before is taken."""
    old, new = write(tmp_path, chat_model, 1), write(tmp_path, chat_model, 2)
    content = bytearray((new / name).read_bytes())
    content[-1] ^= 1
    (new / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        verify(new)
    assert latest_checkpoint(tmp_path) == old


def test_a_changed_byte_of_any_file_is_found(tmp_path: Path, chat_model: Path) -> None:
    """P13: first, middle or last byte of whichever file, the digests' own among them; so are missing, longer and
    foreign weights. As it was it is taken again; somebody's notes beside it do no harm."""
    old, new = write(tmp_path, chat_model, 1), write(tmp_path, chat_model, 2)
    files = [path for path in new.rglob("*") if path.is_file()]
    assert {"tokenizer.json", "digests.json", "state.json", "optimizer.safetensors"} < {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            damaged = bytearray(content)
            damaged[place] ^= 0x10
            path.write_bytes(damaged)
            assert latest_checkpoint(tmp_path) == old, f"{path.name}, byte {place}"
        path.write_bytes(content + b" ")
        assert path.name == "digests.json" or latest_checkpoint(tmp_path) == old, f"{path.name}, longer"
        path.unlink()
        assert latest_checkpoint(tmp_path) == old, f"{path.name}, missing"
        path.write_bytes(content)
        assert latest_checkpoint(tmp_path) == new
    (new / "trainer" / "notes.txt").write_text("the good one")
    assert latest_checkpoint(tmp_path) == new
    (new / "model-00002.safetensors").write_text("")
    assert latest_checkpoint(tmp_path) == old


def test_nothing_sound_is_left(tmp_path: Path, chat_model: Path) -> None:
    """P13: where every checkpoint is damaged none is taken, and the run isn't begun anew over their heads."""
    assert latest_checkpoint(tmp_path) is None
    for step in (1, 2):
        (write(tmp_path, chat_model, step) / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_configuration_names_the_dtype(dtype: torch.dtype, tmp_path: Path, chat_model: Path) -> None:
    """transformers rounds weights to what config.json says, and a base model's may say something else."""
    state = TrainState(1, 1, "d", {}, 0, 0, str(chat_model))
    path = write_checkpoint(tmp_path, state, {"w": torch.ones(2, dtype=dtype)}, {"m": torch.zeros(1)}, 1)
    config = json.loads((path / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.") and "torch_dtype" not in config
    assert config["vocab_size"] == json.loads((chat_model / "config.json").read_text())["vocab_size"]


def test_a_folder_that_a_kill_has_left(tmp_path: Path, chat_model: Path) -> None:
    """P3: what was being written when the trainer died is neither taken nor counted, and makes room for the next."""
    good = write(tmp_path, chat_model, 1)
    left = write(tmp_path, chat_model, 2).rename(tmp_path / "checkpoints" / ".writing-step-00000002")
    (left / "digests.json").unlink()
    (left / "model.safetensors").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) == good and checkpoints(tmp_path) == [good]
    again = write(tmp_path, chat_model, 2)
    assert latest_checkpoint(tmp_path) == again and not left.exists()
    verify(again)


def test_the_same_step_again(tmp_path: Path, chat_model: Path) -> None:
    """P28: a resumed run writes its step anew; nothing of the old one is left in it."""
    path = write(tmp_path, chat_model, 4)
    (path / "of the old one").write_text("")
    state = TrainState(4, 9, "other", {}, 0, 99, str(chat_model))
    assert write_checkpoint(tmp_path, state, {"w": torch.zeros(1)}, {"m": torch.ones(2)}, 1) == path
    verify(path)
    assert read_state(path) == state and read_optimizer(path).keys() == {"m"} and not (path / "of the old one").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "can't be read"), ("{", "can't be read"), ("[]", "can't be read"), ('{"step": 1}', "can't be read"),
        ('{"no_such_field": 1}', "can't be read"), (None, "can't be read"), ("newer", "has format 2"),
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_read(tmp_path: Path, chat_model: Path, content: str | None, text: str) -> None:
    """P50: an error that says which file, also for a format of another time; never a state with holes."""
    path = write(tmp_path, chat_model, 1)
    file = path / "trainer/state.json"
    if content is None:
        file.unlink()
    else:
        file.write_text(file.read_text().replace('"format": 1', '"format": 2') if content == "newer" else content)
    with pytest.raises(CheckpointError, match=text) as caught:
        read_state(path)
    assert str(path) in str(caught.value)


@pytest.mark.slow
def test_transformers_loads_it(tmp_path: Path, chat_model: Path) -> None:
    """A checkpoint is a model directory: weights to the last bit, configuration, tokenizer and chat template; and one
    made of a checkpoint is complete as well."""
    from safetensors import safe_open
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = {name: weight + 1 for name, weight in load_file(chat_model / "model.safetensors").items()}
    base = chat_model
    for step in (1, 2):
        state = TrainState(step, step, "d", {}, 0, 0, str(base))
        base = write_checkpoint(tmp_path, state, weights, {"m": torch.zeros(1)}, 2)
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    assert loaded.keys() - weights.keys() <= {"lm_head.weight"}
    assert AutoTokenizer.from_pretrained(base).chat_template
    with safe_open(base / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, "what transformers 4 asks for"


def test_what_is_not_complete_is_not_there(tmp_path: Path, chat_model: Path) -> None:
    """P13: a folder that was being written, one without digests, and an empty run."""
    assert latest_checkpoint(tmp_path) is None
    path = write(tmp_path, chat_model, 1)
    path.rename(path.with_name(".writing-step-00000001"))
    assert latest_checkpoint(tmp_path) is None
    path = write(tmp_path, chat_model, 2)
    (path / "digests.json").unlink()
    assert checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="can't be read"):
        verify(path)
    (path / "trainer/state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="can't be read"):
        read_state(path)


def test_a_place_that_cannot_be_written(tmp_path: Path, chat_model: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="can't be written"):
        write(tmp_path, chat_model, 1)
