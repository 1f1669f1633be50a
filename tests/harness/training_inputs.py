"""Pytest plugin: what a training run begins with, a tiny model that speaks and a task that it can learn."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of the tiny decoder with a tokenizer and a chat template; nobody writes to it."""
    from .tiny_directory import write_tiny_chat_directory  # brings torch along, which many tests don't need

    directory = tmp_path_factory.mktemp("chat") / "model"
    write_tiny_chat_directory(directory)
    return directory


@pytest.fixture
def task(tmp_path: Path) -> str:
    """The source of the task `letters`, in a file of the test's own."""
    from .training import write_task

    return write_task(tmp_path / "letters.py")
