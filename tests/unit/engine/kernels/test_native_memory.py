"""What the native kernels touch: not a byte beside an operand, in any variant, and nothing that fails a check."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.source_tree import ROOT
from unison.engine.kernels import NativeKernels
from unison.engine.kernels.build import build, library

pytestmark = pytest.mark.skipif(library() is None, reason="no native kernels here")

# Without optimization, which would make compiling them take minutes.
SANITIZED = ("-O0", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
NO_DOT, PORTABLE, TILES = ("-DUNISON_NO_DOT",), ("-DUNISON_SCALAR", "-O1"), ("-DUNISON_EMULATE_TILES",)


def tour(path: Path, kind: str, threads: int, *stops: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness.kernel_tour", str(path), kind, str(threads), *stops],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def account(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert run.returncode == 0, f"exit {run.returncode}\n{run.stderr[-6000:]}"
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The tour of the library in use."""
    return account(tour(build(), "heap", 2))


@pytest.fixture(scope="module")
def sanitizers() -> dict[str, str]:
    """The environment in which a sanitized library can be loaded."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    paths = []
    for name in ("libasan.so", "libubsan.so"):
        answer = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        paths.append(answer.stdout.strip())
    if not all(Path(path).is_absolute() for path in paths):
        pytest.skip(f"{compiler} comes without the sanitizers' libraries")
    return {
        "LD_PRELOAD": " ".join(paths), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-DUNISON_SCALAR",)], ids=["native", "portable"])
def test_sanitizers_find_nothing(flags: tuple[str, ...], sanitizers: dict[str, str], plain: dict[str, Any]) -> None:
    """Addresses and undefined behaviour over every kernel; R3: the bits are those of the library in use."""
    path = build([*SANITIZED, *flags])
    assert account(tour(path, "heap", 3, **sanitizers))["digests"] == plain["digests"]
    control = tour(path, "heap", 3, "too_far", **sanitizers)
    assert control.returncode != 0 and "heap-buffer-overflow" in control.stderr


@pytest.mark.parametrize("kind", ["end", "start"])
@pytest.mark.parametrize("flags", [
    pytest.param((), id="native"), pytest.param(NO_DOT, id="without dot", marks=pytest.mark.slow),
    pytest.param(PORTABLE, id="portable", marks=pytest.mark.slow),
    pytest.param(TILES, id="tiles", marks=pytest.mark.slow),
])  # fmt: skip
def test_no_kernel_touches_a_byte_beside_an_operand(flags: tuple[str, ...], kind: str, plain: dict[str, Any]) -> None:
    """The optimized code, with each operand between pages that can't be touched; R3: with equal bits, but for linear
    layers by tiles."""
    path = build(flags)
    digests = account(tour(path, kind, 1 if kind == "start" else 3))["digests"]
    own = {"linear": plain["digests"]["linear"]} if flags == TILES else {}
    assert digests | own == plain["digests"]
    assert tour(path, kind, 1, "too_far").returncode < 0


def test_the_tour_misses_no_function(plain: dict[str, Any]) -> None:
    """A kernel that is exported and not on the tour would be checked by nobody."""
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(build())], capture_output=True, text=True, check=True)
    exported = {line.split()[-1] for line in symbols.stdout.splitlines() if "unison_" in line}
    assert {name for name in exported if not name.endswith("_words")} == set(plain["called"])


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return NativeKernels()


def test_a_target_outside_the_vocabulary_gives_nan(kernels: NativeKernels) -> None:
    got = kernels.row_logprobs(torch.zeros(3, 5), torch.tensor([5, -1, 4]))
    assert got[0].isnan() and got[1].isnan() and got[2].isfinite()


M = torch.zeros(3, 8)
REFUSED = [
    (TypeError, lambda k: k.linear(M.half(), M.half())),
    (TypeError, lambda k: k.linear(M, M.bfloat16())),
    (TypeError, lambda k: k.linear(M, M, torch.zeros(3, dtype=torch.bfloat16))),
    (TypeError, lambda k: k.linear(M, M, None, torch.zeros(3, 3, dtype=torch.bfloat16))),
    (TypeError, lambda k: k.linear(M.to("meta"), M)),
    (TypeError, lambda k: k.linear(M, M.to("meta"))),
    (ValueError, lambda k: k.linear(M, torch.zeros(3, 9))),
    (ValueError, lambda k: k.linear(M[:, :0], M[:, :0])),
    (ValueError, lambda k: k.linear(M[0], M)),
    (ValueError, lambda k: k.linear(torch.zeros(8, 3).t(), M)),
    (ValueError, lambda k: k.linear(M, torch.zeros(8, 3).t())),
    (ValueError, lambda k: k.linear(M, M, torch.zeros(4))),
    (ValueError, lambda k: k.linear(M, M, torch.zeros(6)[::2])),
    (ValueError, lambda k: k.linear(M, M, None, torch.zeros(3, 4))),
    (ValueError, lambda k: k.linear(M, M, None, torch.zeros(1, 3).expand(3, 3))),
    (ValueError, lambda k: k.linear(M, M, None, torch.zeros(3, 3).t())),
    (TypeError, lambda k: k.logits(M.bfloat16(), M.bfloat16(), torch.zeros(3, 3, dtype=torch.bfloat16))),
    (ValueError, lambda k: k.rms_norm(M, torch.zeros(7), 1e-5)),
    (TypeError, lambda k: k.rms_norm(M, torch.zeros(8, dtype=torch.bfloat16), 1e-5)),
    (ValueError, lambda k: k.add_rms_norm(torch.zeros(2, 8), M, torch.zeros(8), 1e-5)),
    (TypeError, lambda k: k.add_rms_norm(M.bfloat16(), M, torch.zeros(8), 1e-5)),
    (ValueError, lambda k: k.silu_mul(torch.zeros(3, 7))),
    (ValueError, lambda k: k.linear_silu_mul(torch.zeros(3, 7), torch.zeros(5, 7))),
    (ValueError, lambda k: k.linear_silu_mul(torch.zeros(3, 7), torch.zeros(4, 7), out=torch.zeros(3, 4))),
    (TypeError, lambda k: k.silu_mul(torch.zeros(3, 8, dtype=torch.int32))),
    (TypeError, lambda k: k.rope_(M[:, None], M[:, None], M[:, :4].bfloat16(), M[:, :4])),
    (ValueError, lambda k: k.rope_(M[:, None], M[:, None], M[:, :5], M[:, :5])),
    (ValueError, lambda k: k.rope_(M[:, None], M[:, None], M[:2, :4], M[:2, :4])),
    (ValueError, lambda k: k.rope_(M[:, None], M[:, None], M[:, :4], M[:, :3])),
    (ValueError, lambda k: k.rope_(M[:, None].expand(3, 2, 8), M[:, None], M[:, :4], M[:, :4])),
    (TypeError, lambda k: k.row_logprobs(M.bfloat16(), torch.zeros(3, dtype=torch.int64))),
    (TypeError, lambda k: k.row_logprobs(M, torch.zeros(3, dtype=torch.int32))),
    (ValueError, lambda k: k.row_logprobs(M, torch.zeros(2, dtype=torch.int64))),
    (ValueError, lambda k: k.row_logsumexp(M[:, :0])),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_wrong_arguments_are_refused_before_any_pointer_is_used(kernels: NativeKernels, case: int) -> None:
    kind, call = REFUSED[case]
    with pytest.raises(kind):
        call(kernels)


def test_no_rows_are_no_work(kernels: NativeKernels) -> None:
    none, weight = torch.zeros(0, 8), torch.zeros(3, 8)
    assert kernels.linear(none, weight).shape == (0, 3) and kernels.logits(none, weight).shape == (0, 3)
    assert kernels.linear(weight, none).shape == (3, 0)
    assert kernels.rms_norm(none, torch.zeros(8), 1e-5).shape == (0, 8) and kernels.silu_mul(none).shape == (0, 4)
    assert kernels.row_logprobs(none, torch.zeros(0, dtype=torch.int64)).shape == (0,)
    kernels.rope_(none[:, None], none[:, None], none[:, :4], none[:, :4])
