"""The direction of imports, read from the source of every module, and shown once more in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness.source_tree import Import, imports_of, module_name, module_paths

MODULES = {module_name(path): imports_of(path) for path in module_paths()}

NO_PROCESS_OR_CLOCK = {
    "asyncio", "concurrent", "datetime", "http", "multiprocessing", "sched", "select", "selectors", "signal", "socket",
    "socketserver", "ssl", "subprocess", "time", "urllib", "zmq",
}
"""What `engine` may not touch: it is stepped from outside, and time comes in as an argument."""

EXCEPTIONS = {
    ("engine.engine", "time"): "the outermost class offers the real clock as the default of an argument",
    ("engine.kernels.build", "subprocess"): "it runs the C++ compiler",
}
"""(module, what it imports): why."""

CACHE_LAYERS = ("engine.cache.buffer", "engine.cache.strategy", "engine.cache.pool", "engine.cache.prefix")
"""From the bottom to the top; each may import those before it."""


def ours(name: str) -> list[Import]:
    """The imports of our own modules in the module `name`."""
    return [item for item in MODULES[name] if item.is_ours]


def within(module: str, folder: str) -> bool:
    """True when `module` is the package `folder` or lies in it."""
    return module == folder or module.startswith(folder + ".")


@pytest.mark.parametrize("name", [name for name in MODULES if within(name, "ipc")])
def test_ipc_imports_nothing_of_ours(name: str) -> None:
    outside = [item.module for item in ours(name) if not within(item.module, "ipc")]
    assert not outside
    if not within(name, "ipc.arena"):
        assert "torch" not in {item.module.split(".")[0] for item in MODULES[name]}


@pytest.mark.parametrize("name", [name for name in MODULES if within(name, "engine")])
def test_engine_sees_only_the_vocabulary_of_ipc(name: str) -> None:
    outside = {item.module for item in ours(name) if not within(item.module, "engine")}
    assert outside <= {"ipc.types", "ipc.errors"}


@pytest.mark.parametrize("name", [name for name in MODULES if within(name, "engine")])
def test_engine_knows_no_socket_process_or_clock(name: str) -> None:
    foreign = {item.module.split(".")[0] for item in MODULES[name] if not item.is_ours}
    allowed = {module for owner, module in EXCEPTIONS if owner == name}
    assert not (foreign & NO_PROCESS_OR_CLOCK) - allowed


def test_every_exception_is_still_used() -> None:
    for owner, module in EXCEPTIONS:
        assert owner in MODULES and module in {item.module for item in MODULES[owner]}, (owner, module)


@pytest.mark.parametrize("name", [name for name in MODULES if within(name, "engine.attention")])
def test_attention_knows_the_cache_only_for_typing(name: str) -> None:
    """S24: no attention module imports the cache at run time, so there is no cycle."""
    assert not [item for item in ours(name) if within(item.module, "engine.cache") and not item.is_for_typing]


@pytest.mark.slow
def test_attention_alone_leaves_the_cache_unloaded() -> None:
    """S24: imported alone in a fresh interpreter, attention doesn't bring the cache with it."""
    code = "import sys, unison.engine.attention; print([m for m in sys.modules if m.startswith('unison.engine.cache')])"
    assert run_python(code) == "[]"


@pytest.mark.parametrize("layer", CACHE_LAYERS)
def test_cache_layers_import_downwards_only(layer: str) -> None:
    """S17: buffer, strategy, pool and prefix index each know only what lies below."""
    below = CACHE_LAYERS[: CACHE_LAYERS.index(layer)]
    in_cache = {item.module for item in ours(layer) if within(item.module, "engine.cache") and not item.is_for_typing}
    assert in_cache <= set(below)


def test_modules_have_no_import_cycle() -> None:
    """S24: imports that run form no cycle anywhere."""
    edges = {
        name: {item.module for item in ours(name) if not item.is_for_typing and item.module in MODULES} - {name, ""}
        for name in MODULES if name
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join([*path[path.index(name):], name])
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_importing_unison_loads_no_torch() -> None:
    code = "import sys, unison; print('torch' in sys.modules, unison.__all__, set(unison.__all__) <= set(dir(unison)))"
    assert run_python(code) == "False ['AsyncClient', 'Client', 'Engine', 'EngineConfig', 'SamplingParams'] True"


def test_the_vocabulary_needs_no_torch() -> None:
    code = "import sys; from unison import SamplingParams; print(SamplingParams.__module__, 'torch' in sys.modules)"
    assert run_python(code) == "unison.ipc.types False"


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    import unison

    names = "AsyncClient, Client, Engine, EngineConfig, SamplingParams"
    with pytest.raises(AttributeError, match=f"Trainer.*public names are {names}"):
        unison.Trainer  # noqa: B018


def run_python(code: str) -> str:
    """Standard output of `code` in a fresh interpreter with an empty working directory's view of the world."""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=Path(sys.prefix), check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()
