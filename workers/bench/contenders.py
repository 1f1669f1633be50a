"""The contenders: engines in processes of their own, spoken to in JSON lines, each timed by its own clock.

Owns: their processes, their environments and what they took of memory. `peers/protocol.py` is the other side.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from .environments import RECIPES, PeerUnavailableError, peer_python, peers_dir
from .workloads import Workload

LOAD_DEADLINE_S = 1800.0
RUN_DEADLINE_S = 3600.0
CLOSE_DEADLINE_S = 30.0
OURS_ALONE = ("MKL_CBWR", "GOMP_SPINCOUNT", "PYTHONPATH")
"""Variables that this package needs and that would slow a peer down or mislead it."""
_BY_PATH = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module(sys.argv[1], run_name='__main__')"


@dataclass(frozen=True)
class Measurement:
    """One run."""

    seconds: float
    """Wall-clock time."""
    num_tokens: int
    """Generated tokens, the stop token included."""
    peak_rss_bytes: int
    """Most memory that the process held at once during the run, pages of files included; 0 where it can't be told."""

    @property
    def tokens_per_s(self) -> float:
        """Output rate, prefill time included."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Entry:
    """Who takes part, and how its process is started."""

    name: str
    """Column of the table."""
    command: tuple[str, ...]
    """The process."""
    is_ours: bool = False
    """True: the variables of `OURS_ALONE` stay."""
    cache: str = ""
    """Its folder for converted models."""
    options: dict[str, Any] = field(default_factory=dict)
    """What its driver alone understands."""


def unison_entry(name: str, is_exact: bool) -> Entry:
    """This engine."""
    command = (sys.executable, "-m", "unison.workers.bench.peers.unison")
    return Entry(name, command, True, options={"is_exact": is_exact})


def peer_entry(name: str) -> Entry:
    """A peer, installed now if need be.

    Raises: PeerUnavailableError.
    """
    recipe = RECIPES[name]
    python, cache = peer_python(recipe), peers_dir() / f"{name}.cache"
    cache.mkdir(parents=True, exist_ok=True)
    # Isolated, and by path: the peer's environment knows nothing of this package, nor may it find the bench's torch.
    return Entry(name, (str(python), "-I", "-c", _BY_PATH, str(Path(__file__).parent), f"peers.{recipe.driver}"),
                 cache=str(cache))  # fmt: skip


class Contender:
    """One engine's process. Life: started and loaded by `start`, run any number of times, closed.

    Raises: PeerUnavailableError from `start` and `run`, when the process reports an error, ends or doesn't answer.
    """

    def __init__(self, entry: Entry) -> None:
        self.name = entry.name
        self.start_s = 0.0
        """From the process's beginning until it was ready."""
        self.description: dict[str, Any] = {}
        """What the driver says of itself: versions, log-probs, notes."""
        self._entry = entry
        self._log = tempfile.TemporaryFile()
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def start(self, model: Path, dtype: str, threads: int) -> None:
        """Load the model."""
        started = monotonic()
        environment = {key: value for key, value in os.environ.items() if self._entry.is_ours or key not in OURS_ALONE}
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        try:
            self._process = subprocess.Popen(
                self._entry.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment
            )
        except OSError as error:
            raise PeerUnavailableError(f"{self.name} doesn't start: {error}") from error
        request = {
            "model": str(model.resolve()), "dtype": dtype, "threads": threads, "cache": self._entry.cache,
            "options": self._entry.options,
        }  # fmt: skip
        self.description = self._ask({"load": request}, LOAD_DEADLINE_S)["ready"]
        self.start_s = monotonic() - started

    def run(self, workload: Workload) -> Measurement:
        """Generate everything, with the log-prob of each token where the engine can give it."""
        assert self._process is not None
        _forget_peak(self._process.pid)
        work = {
            "prompts": workload.prompts, "n": workload.n, "max_tokens": workload.max_tokens,
            "temperature": workload.temperature, "ignore_eos": workload.ignore_eos,
        }  # fmt: skip
        answer = self._ask({"run": work}, RUN_DEADLINE_S)
        return Measurement(answer["seconds"], answer["num_tokens"], peak_rss_bytes(self._process.pid))

    def close(self) -> None:
        """End the process; without effect on one that has ended."""
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            with suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(CLOSE_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._process = None
        self._log.close()

    def _ask(self, message: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended; reading says how
        line = self._read_line(monotonic() + deadline_s, deadline_s)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise PeerUnavailableError(f"{self.name} answered what is no JSON: {line[:200]!r}") from error
        if "error" in answer:
            raise PeerUnavailableError(f"{self.name}: {answer['error']}")
        return answer

    def _read_line(self, until_s: float, deadline_s: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([descriptor], [], [], max(0.0, until_s - monotonic()))[0]:
                self._process.kill()
                raise PeerUnavailableError(f"{self.name} gave no answer within {deadline_s:.0f} s")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                code = self._process.wait()
                raise PeerUnavailableError(f"{self.name} ended with {code}: {self._last_words()}")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
        return " / ".join(self._log.read().decode(errors="replace").strip().splitlines()[-3:]) or "it said nothing"


def peak_rss_bytes(pid: int) -> int:
    """High-water mark of the resident memory of a process and its children, summed; 0 where the system doesn't tell."""
    total = 0
    for each in _tree(pid):
        with suppress(OSError):
            for line in Path(f"/proc/{each}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
    return total


def _forget_peak(pid: int) -> None:
    """Let the high-water marks begin anew, where the system can."""
    for each in _tree(pid):
        with suppress(OSError):
            Path(f"/proc/{each}/clear_refs").write_text("5")


def _tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []
