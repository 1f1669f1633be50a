"""Building the native library: one file per machine, safe against rivals and missing compilers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from unison.engine.kernels import build

HAS_COMPILER = build.library() is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no native kernels here")


def run(program: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_where_there_is_a_compiler_there_are_native_kernels() -> None:
    """A library that doesn't compile would only skip its tests: here it fails one."""
    try:
        build.Toolchain.find()
    except build.BuildError:
        pytest.skip("no compiler here")
    if os.environ.get("UNISON_KERNELS", "native") != "torch":
        assert build.library() is not None, build.why_unavailable()


@pytest.mark.slow
@needs_compiler
def test_two_builders_at_once_leave_one_library(tmp_path: Path) -> None:
    few = tmp_path / "few"  # the pool alone is a library too, and quickly compiled
    few.mkdir()
    for name in ("pool.cpp", "pool.h"):
        shutil.copy(build.NATIVE_DIR / name, few)
    program = (
        "from pathlib import Path; from unison.engine.kernels import build\n"
        f"build.NATIVE_DIR = Path({str(few)!r})\n"
        "print(build.library().unison_set_threads(2) == 2, build.build())"
    )
    rivals = [run(program, UNISON_CACHE=str(tmp_path)) for _ in range(2)]
    answers = [rival.communicate(timeout=240) for rival in rivals]
    assert all(rival.returncode == 0 for rival in rivals), answers
    assert len({out for out, _ in answers}) == 1 and answers[0][0].startswith("True")
    assert len(list(tmp_path.glob("*.so"))) == 1 and not list(tmp_path.glob("build-*"))


@pytest.mark.slow
def test_without_a_compiler_there_is_a_reason(tmp_path: Path) -> None:
    program = (
        "from unison.engine.kernels import build, select_kernels\n"
        "print(build.library(), select_kernels('cpu').name, build.why_unavailable())"
    )
    missing = run(program, UNISON_CACHE=str(tmp_path), CXX="/nowhere/c++")
    out, errors = missing.communicate(timeout=120)
    assert missing.returncode == 0, errors
    assert out.startswith("None torch no C++ compiler (/nowhere/c++)")


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "c++"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && { echo fake 1; exit 0; }\necho "no such luck" >&2\nexit 3\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("UNISON_CACHE", str(tmp_path / "cache"))
    with pytest.raises(build.BuildError, match="no such luck"):
        build.build()
    assert not list((tmp_path / "cache").glob("*.so")) and not list((tmp_path / "cache").glob("build-*"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    fake = tmp_path / "c++"
    fake.write_text("#!/bin/sh\necho fake 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("UNISON_CACHE", str(blocked))
    with pytest.raises(build.BuildError, match="UNISON_CACHE"):
        build.build()


@needs_compiler
def test_other_flags_are_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.Toolchain.find()
    assert "-ffp-contract=off" in first.flags and not any(
        "fast-math" in flag or "Ofast" in flag for flag in first.flags
    )
    assert build._key(first) != build._key(build.Toolchain.find(["-DUNISON_SCALAR"]))


@needs_compiler
def test_a_damaged_library_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(build.BuildError, match="delete the file"):
        build.load(broken)
