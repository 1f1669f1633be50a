"""Generation while a trainer publishes: tokens per second inside publications and outside of them, in one run.

Asynchronous training, with streams beside it that keep the engine busy throughout, watched from outside: the worker's
token counter is read every few milliseconds, and the trainer's metrics say when it was publishing (optimizer step,
writing, sealing, verification, flip).

Owns: the run and the clock. Called by `bin/bench train`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from time import sleep, time

from ...ipc.client import Client
from ...ipc.client_config import ClientConfig
from ...ipc.errors import UnisonError
from ...ipc.types import OnUpdate, SamplingParams
from ..trainer.metrics import read_metrics

READ_S = 0.02
NUM_STREAMS, STREAM_TOKENS = 16, 256
Reading = tuple[float, int, int]
"""Time, tokens decoded so far, sequences running."""


def measure_generation_during_updates(model: Path, dtype: str, steps: int) -> dict[str, float]:
    """Rates inside and outside of publications, and their ratio."""
    with tempfile.TemporaryDirectory(prefix="unison-bench-") as directory:
        run_dir = Path(directory) / "run"
        command = [
            sys.executable, "-m", "unison.workers.trainer.cli", "--model", str(model), "--dtype", dtype, "--task",
            "sort-words", "--mode", "async", "--steps", str(steps), "--max-tokens", "16", "--run-dir", str(run_dir),
            "--set", "evaluation.interval_steps=0", "--set", "task.num_eval_prompts=1",
            "--set", "checkpoint.interval_steps=0", "--set", "serve.engine.cache.num_tokens=65536",
        ]  # fmt: skip
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            readings = _read(run_dir, process)
        rows = [row for row in read_metrics(run_dir) if row["kind"] == "step"][1:]
        windows = [(row["published_at"] - row["publish_s"], row["published_at"]) for row in rows]
    inside, outside = _rate(readings, windows, True), _rate(readings, windows, False)
    return {"tokens/s inside": inside, "tokens/s outside": outside, "ratio": inside / outside,
            "publications": float(len(windows))}  # fmt: skip


def _read(run_dir: Path, process: subprocess.Popen[bytes]) -> list[Reading]:
    readings: list[Reading] = []
    while process.poll() is None and not (run_dir / "address.json").exists():
        sleep(READ_S)
    try:
        with Client.connect(run_dir, config=ClientConfig(return_s=1.0)) as client:
            streams = threading.Thread(target=_keep_busy, args=(client, process), daemon=True)
            streams.start()
            while process.poll() is None:
                status = client.status()
                readings.append((time(), status.counters["num_decode_tokens"], status.num_running))
                sleep(READ_S)
    except UnisonError:  # the run has ended
        process.wait()
    return readings


def _keep_busy(client: Client, process: subprocess.Popen[bytes]) -> None:
    """Long completions, one set after the other; they go on under each new version, so no buffer waits for them."""
    params = SamplingParams(max_tokens=STREAM_TOKENS, temperature=1.0, ignore_eos=True)
    prompts = [[100 + at, 200 + at] for at in range(NUM_STREAMS)]
    with suppress(UnisonError):  # the run has ended
        while process.poll() is None:
            client.generate_all(prompts, params, on_update=OnUpdate.CARRY)


def _rate(readings: list[Reading], windows: list[tuple[float, float]], is_inside: bool) -> float:
    """Tokens per second over the intervals in which something ran, inside or outside of all windows."""
    first, last = min(start for start, _ in windows), max(end for _, end in windows)
    tokens, seconds = 0, 0.0
    for (start, before, running), (end, after, _) in zip(readings, readings[1:], strict=False):
        is_within = any(low <= (start + end) / 2 <= high for low, high in windows)
        if running and is_within is is_inside and first <= start and end <= last:
            tokens, seconds = tokens + after - before, seconds + end - start
    return tokens / max(seconds, 1e-9)
