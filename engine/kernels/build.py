"""Builds native/*.cpp into one shared library and loads it, once per machine and once per process.

Owns: the compiler call, the cache folder and its lock. Knows nothing of what the functions do. Whoever calls a native
function asks `library()`; where it answers None, `why_unavailable()` says why and the torch kernels do the work.

The file name carries a hash of the sources, the flags, the compiler's version and the CPU's features, so a library
built for another machine or from other sources is never loaded. Floating-point contraction is off: every fused
multiply-add is written as one (see native/simd.h), which is what makes the results equal on every machine.

Environment: UNISON_KERNELS=torch turns native code off; CXX names the compiler; UNISON_CACHE the folder (default
~/.cache/unison).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

NATIVE_DIR = Path(__file__).parent / "native"
BUILD_TIMEOUT_S = 300.0
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-w")


class BuildError(RuntimeError):
    """The library can't be built or loaded here; the message says what to do."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler and how it is called."""

    compiler: str
    """Path of the C++ compiler."""
    version: str
    """First line of its --version."""
    flags: tuple[str, ...]
    """Flags of every translation unit."""

    @classmethod
    def find(cls, extra_flags: Sequence[str] = ()) -> Toolchain:
        """The compiler named by CXX, else the first of c++, g++, clang++.

        Raises: BuildError where there is none or it doesn't answer.
        """
        wanted = os.environ.get("CXX")
        names = (wanted,) if wanted else ("c++", "g++", "clang++")
        path = next((found for name in names if (found := shutil.which(name))), None)
        if path is None:
            raise BuildError(f"no C++ compiler ({', '.join(names)}): install g++ or clang++, or set CXX")
        try:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30.0, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise BuildError(f"the C++ compiler {path} doesn't run: {error}") from error
        # Arm compilers of the versions in use take -mcpu for what -march=native means elsewhere.
        native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
        flags = (*FLAGS, native, *extra_flags)
        return cls(path, answer.stdout.splitlines()[0] if answer.stdout else "unknown", flags)


def cache_dir() -> Path:
    """Folder of built libraries: $UNISON_CACHE, else ~/.cache/unison."""
    configured = os.environ.get("UNISON_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "unison"


def cpu_features() -> str:
    """The feature line of the first CPU, or the machine's name where the system doesn't tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(("flags", "Features")):
                    return " ".join(sorted(line.split(":", 1)[1].split()))
    except OSError:
        pass
    return platform.machine()


def sources() -> list[Path]:
    """Translation units, in name order."""
    return sorted(NATIVE_DIR.glob("*.cpp"))


def build(extra_flags: Sequence[str] = ()) -> Path:
    """Path of the library for this machine, built now if it isn't there. Safe against builders in other processes.

    Raises: BuildError with the compiler's last words, or the folder that can't be written.
    """
    toolchain = Toolchain.find(extra_flags)
    folder = cache_dir()
    target = folder / f"unison-kernels-{_key(toolchain)}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder / f"{target.stem}.lock"):
            if not target.exists():
                _compile(toolchain, target)
    except OSError as error:
        raise BuildError(f"can't write the kernel cache {folder}: {error}; set UNISON_CACHE to your own") from error
    return target


def load(path: Path) -> ctypes.CDLL:
    """Loads a built library.

    Raises: BuildError when the loader refuses it.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"can't load {path}: {error}; delete the file to have it built again") from error


def library() -> ctypes.CDLL | None:
    """The native library of this process, or None (see `why_unavailable`). Built and loaded at the first call."""
    return _loaded()[0]


def why_unavailable() -> str | None:
    """Why `library()` is None; None when there is one."""
    return _loaded()[1]


_lock = threading.Lock()
_outcome: list[tuple[ctypes.CDLL | None, str | None]] = []  # empty until the first call, then one entry for good


def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    if not _outcome:
        with _lock:
            if not _outcome:
                _outcome.append(_try_load())
    return _outcome[0]


def _try_load() -> tuple[ctypes.CDLL | None, str | None]:
    choice = os.environ.get("UNISON_KERNELS", "native")
    if choice == "torch":
        return None, "turned off by UNISON_KERNELS=torch"
    if choice != "native":
        return None, f"UNISON_KERNELS={choice!r} is unknown; it takes 'native' or 'torch'"
    try:
        return load(build()), None
    except BuildError as error:
        return None, str(error)


def _key(toolchain: Toolchain) -> str:
    digest = hashlib.sha256()
    for path in sorted([*NATIVE_DIR.glob("*.cpp"), *NATIVE_DIR.glob("*.h")]):
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode() + content)
    for part in (toolchain.compiler, toolchain.version, *toolchain.flags, platform.machine(), cpu_features()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the file's lock; the system drops it should this process die."""
    with open(path, "w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compile(toolchain: Toolchain, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        folder = Path(scratch)
        command = [toolchain.compiler, *toolchain.flags]
        objects: list[str] = []
        jobs: list[tuple[str, subprocess.Popen[str]]] = []
        with ExitStack() as running:  # one unit per process; where one is refused the others are stopped
            for source in sources():
                objects.append(str(folder / f"{source.stem}.o"))
                job = running.enter_context(_start([*command, "-c", str(source), "-o", objects[-1]]))
                running.callback(job.kill)
                jobs.append((source.name, job))
            for name, job in jobs:
                _finish(job, name)
        linked = folder / target.name
        with _start([*command, "-shared", *objects, "-o", str(linked)]) as link:
            _finish(link, "the objects it made")
        os.replace(linked, target)  # readers see no file or the whole file


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _finish(job: subprocess.Popen[str], what: str) -> None:
    try:
        _, errors = job.communicate(timeout=BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.communicate()
        raise BuildError(f"compiling {what} took longer than {BUILD_TIMEOUT_S:.0f} s") from None
    if job.returncode != 0:
        tail = "\n".join(errors.strip().splitlines()[-20:])
        raise BuildError(f"the compiler refused {what} (exit {job.returncode}):\n{tail}")
