"""What a measurement was made on: processor, the features that decide its speed, cores, memory, versions, date.

Owns: reading them. Knows no paths and no names of hosts, so a report may be published as it is.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from ..engine.config import available_cores
from ..engine.kernels.build import cpu_features

FEATURES = (
    "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "bf16", "sve", "i8mm",
)  # fmt: skip
"""Those of the CPU's features that kernels choose their code by."""


def describe() -> dict[str, Any]:
    """The machine and the environment of this process, and the day."""
    present = set(cpu_features().split())
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": {
            "processor": _model(), "architecture": platform.machine(), "cores": available_cores(),
            "features": [name for name in FEATURES if name in present],
            "memory_bytes": psutil.virtual_memory().total,
            "huge_pages": _setting("/sys/kernel/mm/transparent_hugepage/enabled"),
            "system": f"{platform.system()} {platform.release().split('-')[0]}",
        },
        "versions": _versions(("unison-rl", "torch", "transformers", "numpy", "trl")),
    }  # fmt: skip


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _model() -> str:
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _setting(path: str) -> str:
    """The chosen word of a file like `always [madvise] never`; empty where there is no such file."""
    return _text(path).partition("[")[2].partition("]")[0]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
