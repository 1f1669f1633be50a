"""TrainSupervisor: bin/serve's supervisor with two kinds of children more: rollout workers and the trainer.

It makes the rings between them and keeps their memory, so that neither orders nor results go with a child. The run ends
when the trainer has ended by itself. Told to stop once, it asks the trainer to end after its step, with a checkpoint,
and keeps everything else alive meanwhile; told twice, it kills at once.

Owns: rings, services of training. Called by bin/train.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...engine.config import available_cores
from ...ipc.errors import CheckpointError, ConfigError
from ...ipc.ring import Ring
from ..config import ServeConfig
from ..process import EXIT_INTERRUPTED, EXIT_OK, Child, Report
from ..service import Service
from ..supervisor import Supervisor
from .checkpoint import latest_checkpoint, read_state
from .config import CONFIG_FILE, TrainConfig
from .ledger import LEDGER_FILE, open_to_read
from .metrics import METRICS_FILE


class TrainSupervisor(Supervisor):
    """Life: built → `run` until the last step, a signal, or a process fails for good. One thread."""

    def __init__(
        self, config: TrainConfig, on_ready: Callable[[dict[str, Any]], None], on_report: Callable[[Report], None],
        keep_serving: bool = False,
    ) -> None:  # fmt: skip
        """`on_report` gets what the trainer says of its steps; `keep_serving`: the end of training isn't the run's.

        Raises:
            ConfigError: as for bin/serve, or the checkpoint to go on from is of another model.
        """
        self._train_config = config
        self._on_report = on_report
        self._keep_serving = keep_serving
        super().__init__(_serving_part(config), on_ready)
        self._train_config = replace(config, serve=replace(config.serve, run_dir=str(self.run_dir)))
        partial = self.run_dir / f".{CONFIG_FILE}"
        partial.write_text(json.dumps(self._train_config.to_dict(), indent=2))
        partial.rename(self.run_dir / CONFIG_FILE)
        size = config.rollout.ring_mib << 20
        self._rings = [{kind: Ring.create(size) for kind in ("orders", "results")}
                       for _ in range(config.rollout.num_workers)]  # fmt: skip
        limits = config.serve.supervisor
        self._rollouts = [
            Service(f"rollout-{number}", limits, lambda number=number: self._spawn_rollout(number))  # type: ignore[misc]
            for number in range(config.rollout.num_workers)
        ]
        self._trainer = Service("trainer", limits, self._spawn_trainer, (EXIT_OK, EXIT_INTERRUPTED))
        self._services += [*self._rollouts, self._trainer]
        self._is_trainer_told = False

    @property
    def is_done(self) -> bool:
        """Whether the trainer has reached its last step."""
        return self._trainer.exit_code == EXIT_OK and self._trainer.child is None

    def _is_over(self) -> bool:
        if len(self._signals) > 1:
            return True
        if self._trainer.num_starts and self._trainer.child is None:
            return bool(self._signals) or not (self._keep_serving and self.is_done)
        if self._signals and not self._is_trainer_told:
            self._is_trainer_told = True
            if self._trainer.child is None or not self._trainer.is_ready:
                return True  # nothing has begun that would be lost
            self._trainer.child.terminate()
            self._on_report(Report("stopping", {}))
        return False

    def _start_due(self) -> None:
        super()._start_due()
        if self._worker.is_ready and self._trainer.num_starts == 0:
            for service in (*self._rollouts, self._trainer):
                service.start()

    def _hear(self, service: Service, report: Report) -> None:
        super()._hear(service, report)
        if service is self._trainer and report.kind not in ("beat", "failed"):
            self._on_report(report)

    def _stop(self) -> None:
        super()._stop()
        for pair in self._rings:
            for ring in pair.values():
                ring.close()

    def _spawn_rollout(self, number: int) -> Child:
        fds = self._ring_fds(number, "")
        return self._spawn_training(f"rollout-{number}", "unison.workers.rollout", fds)

    def _spawn_trainer(self) -> Child:
        fds: dict[str, int] = {}
        for number in range(len(self._rings)):
            fds |= self._ring_fds(number, f"{number}.")
        return self._spawn_training("trainer", "unison.workers.trainer", fds)

    def _ring_fds(self, number: int, infix: str) -> dict[str, int]:
        return {
            f"{kind}.{infix}{part}": fd
            for kind, ring in self._rings[number].items()
            for part, fd in zip(("memory", "data", "space"), ring.fds, strict=True)
        }

    def _spawn_training(self, name: str, module: str, fds: dict[str, int]) -> Child:
        config = self._train_config
        return self._spawn(name, module, fds, train=config.to_dict(), base_model=config.serve.model)


def _serving_part(config: TrainConfig) -> ServeConfig:
    """What worker and server are started with: the run's newest checkpoint where there is one, under its version.

    Where later steps than the checkpoint's were live, their ordinals aren't used again: it gets the next one.
    """
    serve = config.serve
    if config.max_lag and serve.engine.runtime.num_threads is None:
        threads = max(1, available_cores() // 2)
        runtime = replace(serve.engine.runtime, num_threads=threads)
        serve = replace(serve, engine=replace(serve.engine, runtime=runtime))
    if not serve.run_dir:
        return serve
    run_dir = Path(serve.run_dir)
    checkpoint, highest = latest_checkpoint(run_dir), highest_ordinal(run_dir)
    if checkpoint is None:
        return replace(serve, worker=replace(serve.worker, first_ordinal=highest + 1))
    state = read_state(checkpoint)
    if Path(state.base_model) != Path(serve.model):
        raise ConfigError("model", f"is {serve.model}, but the run in {run_dir} began with {state.base_model}")
    ordinal = state.ordinal if highest <= state.ordinal else highest + 1
    return replace(
        serve, model=str(checkpoint), served_name=serve.name, worker=replace(serve.worker, first_ordinal=ordinal)
    )


def highest_ordinal(run_dir: Path) -> int:
    """Highest ordinal in a run's ledger, without taking part in it; -1 where there is none."""
    if not (run_dir / LEDGER_FILE).exists():
        return -1
    with closing(open_to_read(run_dir / LEDGER_FILE)) as db:
        try:
            return int(db.execute("SELECT coalesce(max(ordinal), -1) FROM versions").fetchone()[0])
        except sqlite3.DatabaseError as error:
            raise CheckpointError(f"{run_dir / LEDGER_FILE} isn't a run's ledger: {error}") from error


def holds_a_run(run_dir: Path) -> bool:
    """Whether a directory has a run's traces."""
    return any((run_dir / name).exists() for name in (CONFIG_FILE, LEDGER_FILE, METRICS_FILE))


