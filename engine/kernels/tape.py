"""Tapes: a forward pass recorded as a list of native calls, and run again by one.

Owns: the recording and its checks. Steady decode runs the same calls on the same addresses step after step; replayed,
they cost no Python. What is recorded are the calls themselves, so a replay computes what the recorded run computed,
from what the inputs' memory holds now.

A recording is refused where torch computed something in between (a copy, a sum): a replay would leave it out. All
tensors that native calls were given addresses of must outlive the tape: outputs made meanwhile are kept here, inputs
are the caller's.

Thread rule: a recording belongs to the thread that began it; a tape is replayed by one thread at a time.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS = frozenset("empty empty_like empty_strided new_empty".split())
_VIEWS = frozenset(
    "view _unsafe_view reshape as_strided split split_with_sizes slice select unsqueeze squeeze alias detach t "
    "transpose expand unbind".split()
)
"""Torch's operations that compute nothing, as long as what they give lies in the same memory: reshape may copy."""


class _Current(threading.local):
    tape: Tape | None = None


_current = _Current()


class NativeFunction:
    """A C function of the native library, that is written down while its thread records."""

    __slots__ = ("_call", "_words", "name")

    def __init__(self, lib: ctypes.CDLL, name: str, argtypes: tuple[Any, ...], restype: Any = None) -> None:
        self.name = name
        self._call = getattr(lib, name)
        self._call.argtypes = argtypes
        self._call.restype = restype
        words = getattr(lib, f"{name}_words", None)
        self._words = ctypes.cast(words, ctypes.c_void_p).value if words is not None else None

    def __call__(self, *arguments: Any) -> Any:
        tape = _current.tape
        if tape is not None:
            tape.write(self.name, self._words, arguments)
        return self._call(*arguments)


class _Watch(TorchDispatchMode):
    """Notes what torch computes during a recording."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        is_passive = name in _ALLOCATIONS or (name in _VIEWS and _shares_memory(args[0], result))
        if not is_passive:
            self.seen.add(name)
        return result


def _shares_memory(source: Any, result: Any) -> bool:
    parts = result if isinstance(result, list | tuple) else [result]
    return all(part.untyped_storage().data_ptr() == source.untyped_storage().data_ptr() for part in parts)


class Tape:
    """Life: recorded once with `recording` → replayed any number of times."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._replay = lib.unison_replay
        self._replay.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_void_p]
        self._replay.restype = ctypes.c_int64
        self._functions: list[int] = []
        self._starts: list[int] = []
        self._words: list[int] = []
        self._names: list[str] = []
        self._kept: list[Any] = []
        self._sealed: tuple[Any, ...] = ()
        self._fault = ctypes.c_int(0)
        self.why_not: str | None = None
        """Why this recording can't be replayed; None where it can."""

    def write(self, name: str, function: int | None, arguments: tuple[Any, ...]) -> None:
        """Add one call."""
        if function is None:
            self.why_not = f"{name} can't be recorded"
            return
        self._names.append(name)
        self._functions.append(function)
        self._starts.append(len(self._words))
        self._words.extend(_word(argument) for argument in arguments)

    def keep(self, thing: Any) -> None:
        """Hold what a recorded address points to for as long as the tape lives."""
        self._kept.append(thing)

    def seal(self) -> None:
        """End the recording."""
        functions = (ctypes.c_int64 * len(self._functions))(*self._functions)
        starts = (ctypes.c_int64 * len(self._starts))(*self._starts)
        words = (ctypes.c_int64 * len(self._words))(*self._words)
        self._sealed = functions, starts, words, len(self._functions), ctypes.byref(self._fault)

    def replay(self) -> tuple[str, int] | None:
        """Run all calls again; None, or the name of the call that failed and what it returned."""
        failed = self._replay(*self._sealed)
        return None if failed < 0 else (self._names[failed], self._fault.value)


@contextmanager
def recording(tape: Tape, is_watched: bool = True) -> Iterator[None]:
    """Everything native that this thread calls meanwhile is written on the tape. `is_watched` looks for what torch
    computes in between, which costs time and makes `tape.why_not` say so.
    """
    watch = _Watch()
    _current.tape = tape
    try:
        if is_watched:
            with watch:
                yield
        else:
            yield
    finally:
        _current.tape = None
    if watch.seen:
        tape.why_not = f"torch computes {', '.join(sorted(watch.seen))} in between"
    tape.seal()


def keep(thing: Any) -> None:
    """Hold `thing` with the tape that this thread records, if it does."""
    tape = _current.tape
    if tape is not None:
        tape.keep(thing)


def _word(argument: Any) -> int:
    if argument is None:
        return 0
    if isinstance(argument, float):
        return int.from_bytes(struct.pack("<f", argument), "little")
    return int(argument)
