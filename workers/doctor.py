"""`bin/serve doctor`: what this machine has of what Unison stands on, and a short self-test of it.

Every check is `ok`, a `warning` (it works, slower or not for everything) or `failed` (something won't work), with what
was found and what to do about it. Nothing is changed on the machine; the exit code is 0 unless a check has failed.

Owns: the checks and how they are shown. The experiments are in trial.py. Called by the command line.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ..engine.config import available_cores
from ..engine.kernels.build import BuildError, Toolchain, cpu_features
from ..ipc.errors import UnisonError
from ..ipc.memory import available_bytes
from .machine import FEATURES, describe
from .trial import run_trials

EXIT_FAILED = 1
DEADLINE_S = 10.0
WIDE_COLUMNS = 200
MIN_PYTHON = (3, 11)
MIN_FILES = 1024
"""Descriptors that one process may need: a socket per client, three per ring, one per child."""
MIN_MEMORY_BYTES = 1 << 30
VECTOR_FEATURES = ("avx2", "asimd")
"""One of these, or the native kernels are plain loops."""
PACKAGES = (
    "torch", "numpy", "safetensors", "transformers", "psutil", "prometheus-client", "starlette", "uvicorn", "xxhash",
    "pyzmq", "msgpack", "click", "rich",
)  # fmt: skip
SWITCHES = (
    "UNISON_KERNELS", "UNISON_CACHE", "CXX", "MKL_CBWR", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""Environment that decides speed or bits."""


class State(str, Enum):
    """What a check came to."""

    OK = "ok"
    """Nothing to do."""
    WARNING = "warning"
    """It works, but slower or with less than there could be."""
    FAILED = "failed"
    """Something won't work."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    """What."""
    state: State
    """What it came to."""
    found: str
    """What is there."""
    advice: str = ""
    """What to do; empty where there is nothing to do."""


def examine(model: Path | None, deadline_s: float = DEADLINE_S) -> list[Check]:
    """Every check, in the order in which they are shown."""
    checks = [*_system(), *_processor(), *_memory(model), *_limits(), *_kernels(), *_devices()]
    if any(check.name == "shared memory" and check.state is State.FAILED for check in checks):
        return checks  # no process of ours could be tried
    try:
        outcomes = run_trials(model, deadline_s)
    except (UnisonError, OSError) as error:
        advice = "nothing here can run before this is solved"
        return [*checks, Check("self-test", State.FAILED, f"can't be begun: {error}", advice)]
    for outcome in outcomes:
        checks.append(_trial_check(outcome.part, outcome.is_good, outcome.text))
    return checks


def show(model: Path | None, as_json: bool, deadline_s: float) -> int:
    """Print every check; returns the exit code."""
    checks = examine(model, deadline_s)
    if as_json:
        click.echo(json.dumps({"checks": [asdict(check) for check in checks], "machine": describe()}, indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDE_COLUMNS)
        console.print(render(checks))
    return EXIT_FAILED if any(check.state is State.FAILED for check in checks) else 0


def render(checks: list[Check]) -> Table:
    """The table for people."""
    colours = {State.OK: "green", State.WARNING: "yellow", State.FAILED: "bold red"}
    counts = ", ".join(f"{sum(check.state is state for check in checks)} {state.value}" for state in State)
    table = Table(title=counts)
    for name in ("check", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for check in checks:
        state = f"[{colours[check.state]}]{check.state.value}[/]"
        table.add_row(check.name, state, check.found.replace("[", r"\["), check.advice.replace("[", r"\["))
    return table


# ---- what is there ---------------------------------------------------------------------------------------------------


def _system() -> Iterator[Check]:
    has_linux = sys.platform.startswith("linux")
    yield Check(
        "system", State.OK if has_linux else State.FAILED, f"{platform.system()} {platform.release()}",
        "" if has_linux else "the processes need Linux (memfd, eventfd, pidfd); the engine alone runs where torch does",
    )  # fmt: skip
    is_new = sys.version_info[:2] >= MIN_PYTHON
    needed = ".".join(map(str, MIN_PYTHON))
    yield Check("python", State.OK if is_new else State.FAILED, platform.python_version(),
                "" if is_new else f"install Python {needed} or newer and set PYTHON to it")  # fmt: skip
    versions, missing = [], []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    yield Check(
        "packages", State.FAILED if missing else State.OK,
        ", ".join(versions) + (f"; missing: {', '.join(missing)}" if missing else ""),
        "pip install -c constraints.txt -e ." if missing else "",
    )  # fmt: skip
    switches = [f"{name}={os.environ[name]}" for name in SWITCHES if name in os.environ]
    yield Check("environment", State.OK, ", ".join(switches) or "none of ours is set")


def _processor() -> Iterator[Check]:
    machine = describe()["machine"]
    present = set(cpu_features().split())
    features = [name for name in FEATURES if name in present]
    has_vectors = any(name in present for name in VECTOR_FEATURES)
    yield Check(
        "processor", State.OK if has_vectors else State.WARNING,
        f"{machine['processor']} ({machine['architecture']}): {', '.join(features) or 'no vector features'}",
        "" if has_vectors else "results are the same without AVX2 or NEON, and slow",
    )  # fmt: skip
    cores, quota = available_cores(), cpu_quota()
    text = f"{cores} of {os.cpu_count()} may be used"
    if quota is not None and quota < cores:
        fitting = max(1, int(quota))
        yield Check(
            "cores", State.WARNING, f"{text}, but the control group allows {quota:g} CPUs' time",
            f"--set engine.runtime.num_threads={fitting}: threads beyond the quota are stopped in the middle of a "
            "product, and the others wait for them",
        )  # fmt: skip
    else:
        yield Check("cores", State.OK, text)
    import torch

    threads = torch.get_num_threads()
    yield Check(
        "threads", State.OK if threads <= cores else State.WARNING,
        f"torch takes {threads}, the native kernels {cores} unless engine.runtime.num_threads says otherwise",
        "" if threads <= cores else f"OMP_NUM_THREADS={cores}: torch would take more threads than there are cores",
    )  # fmt: skip


def cpu_quota(system: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the closest control group gives this process; None where nothing limits it. `system` is
    where proc and sys are mounted.

    Source: cgroups(7); Linux admin guide, "CPU" (cpu.max in v2, cpu.cfs_quota_us in v1).
    """
    quotas: list[float] = []
    for line in _lines(system / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for level in (Path(path), *Path(path).parents):
            quotas += _quotas(system.joinpath("sys/fs/cgroup", controllers, *level.parts[1:]))
    return min(quotas, default=None)


def _quotas(folder: Path) -> Iterator[float]:
    words = " ".join(_lines(folder / "cpu.max")).split()
    words = words or [*_lines(folder / "cpu.cfs_quota_us"), *_lines(folder / "cpu.cfs_period_us")]
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        yield int(words[0]) / int(words[1])


def _memory(model: Path | None) -> Iterator[Check]:
    total, free = describe()["machine"]["memory_bytes"], available_bytes()
    is_enough = free >= MIN_MEMORY_BYTES
    yield Check(
        "memory", State.OK if is_enough else State.WARNING,
        f"{_gib(free)} can be taken now of {_gib(total)} (control groups counted)",
        "" if is_enough else "free some memory, or raise the container's limit",
    )  # fmt: skip
    if model is not None:
        yield _model_memory(model, free)
    pages = describe()["machine"]["huge_pages"]
    shared = _chosen(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    is_granted = pages in ("always", "madvise")
    yield Check(
        "huge pages", State.OK if is_granted else State.WARNING,
        f"{pages or 'unknown'} for the KV, {shared or 'unknown'} for the weights in shared memory",
        "" if is_granted else "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled saves address translation",
    )  # fmt: skip
    missing = [name for name in ("memfd_create", "eventfd", "pidfd_open") if not hasattr(os, name)]
    yield Check(
        "shared memory", State.FAILED if missing else State.OK,
        f"no {', '.join(missing)}" if missing else "memfd, eventfd and pidfd; nothing is kept in /dev/shm",
        "a Linux of 2020 or newer (5.3) has them" if missing else "",
    )  # fmt: skip


def _model_memory(model: Path, free: int) -> Check:
    from .config import ServeConfig
    from .plan import MemoryPlan

    try:
        plan = MemoryPlan.of(ServeConfig.from_dict({"model": str(model)}))
    except UnisonError as error:
        return Check("model", State.FAILED, str(error), "give a Hugging Face directory (bin/fetch-model makes one)")
    needed = plan.arena_bytes + plan.kv_bytes
    is_fitting = needed <= free
    return Check(
        "model", State.OK if is_fitting else State.FAILED,
        f"{plan.parameters / 1e6:.1f} M parameters: {_gib(plan.arena_bytes)} of weight buffers and "
        f"{_gib(plan.kv_bytes)} of KV to serve it",
        "" if is_fitting else f"{_gib(free)} are free: lower engine.cache.num_tokens, or take a smaller model",
    )  # fmt: skip


def _limits() -> Iterator[Check]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = files == resource.RLIM_INFINITY or files >= MIN_FILES
    yield Check(
        "open files", State.OK if is_enough else State.WARNING, f"{_limit(files)} (at most {_limit(most)})",
        "" if is_enough else f"ulimit -n {MIN_FILES}: every client and every ring takes descriptors",
    )  # fmt: skip
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Check("locked memory", State.OK, f"{_limit(locked)} bytes; only CUDA's staging buffers are locked")
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    is_bounded = space != resource.RLIM_INFINITY
    yield Check(
        "address space", State.WARNING if is_bounded else State.OK, _limit(space) + (" bytes" if is_bounded else ""),
        "ulimit -v unlimited: every buffer of the arena is mapped in several processes" if is_bounded else "",
    )  # fmt: skip
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    is_usable = os.access(base, os.W_OK | os.X_OK)
    yield Check(
        "run directories", State.OK if is_usable else State.FAILED, base,
        "" if is_usable else "it can't be written: give --run-dir, or set XDG_RUNTIME_DIR",
    )  # fmt: skip


def _kernels() -> Iterator[Check]:
    from ..engine.kernels.selection import select_kernels, why_not_native

    try:
        compiler = Toolchain.find()
        yield Check("compiler", State.OK, f"{compiler.compiler}: {compiler.version}")
    except BuildError as error:
        yield Check("compiler", State.WARNING, str(error), "apt install g++: the native kernels are built with it")
    reason = why_not_native("cpu")
    kernels = select_kernels("cpu")
    found = ", ".join(f"{name} {value}" for name, value in kernels.describe().items())
    yield Check(
        "kernels", State.WARNING if reason else State.OK, found + (f"; not native: {reason}" if reason else ""),
        "torch computes meanwhile, several times slower in bfloat16" if reason else "",
    )  # fmt: skip


def _devices() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        build = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch"
        text = f"{build} and sees no device" if torch.version.cuda else "this torch is built without CUDA"
        yield Check("GPU", State.OK, f"{text}; the CPU serves and trains")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Check(f"GPU {index}", State.OK, f"{name}, {_gib(free)} of {_gib(total)} free; serving only: "
                    "training runs on the CPU for now")  # fmt: skip
    yield _device_sharing()


def _device_sharing() -> Check:
    """Whether an allocation can be exported for other processes, as the arena does on a GPU."""
    from ..ipc.arena.cuda import CudaRuntime

    try:
        runtime = CudaRuntime()
        address = runtime.malloc(1 << 20)
        try:
            runtime.export(address)
        finally:
            runtime.free(address)
    except UnisonError as error:
        advice = "a publisher in another process can't write weights: containers need --ipc=host or a common namespace"
        return Check("CUDA IPC", State.WARNING, str(error), advice)
    return Check("CUDA IPC", State.OK, "device memory can be shared with other processes")


def _trial_check(part: str, is_good: bool | None, text: str) -> Check:
    names = {"bfloat16": "exact in bfloat16", "float32": "exact in float32", "model": "exact on the model"}
    name = names.get(part, part)
    if is_good:
        return Check(name, State.OK, text)
    if is_good is None:
        return Check(name, State.WARNING, text, "give it more time: --deadline-s 60")
    if part not in names:
        return Check(name, State.FAILED, text, "processes can't speak to each other here; look at the limits above")
    advice = "log-probs of engine and trainer will differ; a compiler gives kernels that keep the promise"
    if part == "float32" and "MKL_CBWR" not in os.environ:
        advice = "start through bin/serve and bin/train, which set MKL_CBWR (bin/exact-environment)"
    return Check(name, State.FAILED if part != "float32" else State.WARNING, text, advice)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _chosen(path: Path) -> str:
    """The word in brackets of a file like `always [madvise] never`."""
    return " ".join(_lines(path)).partition("[")[2].partition("]")[0]


def _gib(count: Any) -> str:
    return f"{int(count) / (1 << 30):.2f} GiB"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
