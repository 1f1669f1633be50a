"""Pytest plugin: the real model, fetched once per machine, and the mark of the tests that need it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

MODEL_NAME = "smollm2-135m"


def models_dir() -> Path:
    """Folder of fetched models: $UNISON_CACHE/models, else ~/.cache/unison/models."""
    cache = os.environ.get("UNISON_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "unison") / "models"


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """A Hugging Face directory of SmolLM2-135M-Instruct, downloaded the first time; one that exists is complete."""
    target = models_dir() / MODEL_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{MODEL_NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second test run that starts now waits, and finds the directory
        if not target.is_dir():
            from unison.workers.fetch.publish import fetch_model
            from unison.workers.fetch.recipe import RECIPES

            fetch_model(RECIPES[MODEL_NAME], target)
    return target


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the real model, so that `-m "not real_model"` works without anyone having to remember it."""
    for item in items:
        if "model_dir" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real_model)
