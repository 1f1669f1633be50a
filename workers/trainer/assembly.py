"""How a training loop's parts are put together, from nothing or from a checkpoint.

Owns: the order of construction and of taking apart. Called by the trainer's process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...engine.config import EngineConfig, available_cores
from ...engine.models.loader import load_into
from ...engine.models.spec import ModelSpec
from ...ipc.arena.publisher import WeightPublisher
from ...ipc.client import Client
from ...ipc.client_config import ClientConfig
from ...ipc.errors import CheckpointError
from ...ipc.ring import Ring, RingReader, RingWriter
from ..cli import without_secrets
from ..machine import describe
from ..rollout.runner import RolloutRunner, RunnerLimits, WorkerLink
from ..rollout.tasks import load_task
from .checkpoint import latest_checkpoint, read_optimizer, read_state
from .config import TrainConfig
from .kept import VersionKeeper
from .ledger import LEDGER_FILE, Ledger
from .loop import Report, TrainLoop, TrainParts
from .metrics import MetricsWriter
from .optimizer import PolicyOptimizer
from .policy import TrainablePolicy
from .step import BatchGradient

log = logging.getLogger(__name__)

Fds = Mapping[str, Sequence[int]]
"""Descriptors of one rollout worker's two rings: `orders` and `results`."""


@contextmanager
def assemble_loop(
    config: TrainConfig, base_model: Path, links: Sequence[Fds], incarnation: str, report: Report,
    is_stopping: Callable[[], bool],
) -> Iterator[TrainLoop]:  # fmt: skip
    """A loop at the step of the run's newest checkpoint, or at step 0; taken apart at the end of the block.

    Raises:
        ConfigError, CheckpointError, DeadlineError: it can't begin.
    """
    run_dir = Path(config.serve.run_dir)
    patience = ClientConfig(connect_s=config.serve.supervisor.start_s)
    with ExitStack() as stack:
        task = load_task(config.task.source, config.task.rewards, config.task.options)
        policy = TrainablePolicy(
            ModelSpec.from_dir(base_model), trainer_engine_config(config), config.optimizer.activation_checkpointing
        )
        client = stack.enter_context(Client.connect(run_dir, role="trainer", config=patience))
        publisher = stack.enter_context(WeightPublisher(client))
        version, tensors = publisher.read_live()
        optimizer = PolicyOptimizer(policy.gradient_layout, tensors, config.optimizer, config.steps)
        ledger = Ledger(run_dir / LEDGER_FILE)
        stack.callback(ledger.close)
        ledger.use_settings(without_keys(config), machine(policy, client.status().is_exact))
        step = 0
        is_restarted = ledger.highest_ordinal >= 0
        checkpoint = latest_checkpoint(run_dir)
        if checkpoint is not None:
            state = read_state(checkpoint)
            if not ledger.knows(state.step, state.digest):
                raise CheckpointError(
                    f"{checkpoint} isn't of the run whose ledger lies beside it: no step {state.step} there made its "
                    "weights; put the two together again, or begin a new run"
                )
            optimizer.restore(read_optimizer(checkpoint), state.optimizer)
            step = state.step
            if version.digest != state.digest:
                version = optimizer.publish(publisher).version
        elif is_restarted:  # ended before its first checkpoint: back to the weights that it began with
            with torch.no_grad():
                load_into(base_model, policy.gradient_layout, optimizer.masters)
            if not ledger.knows(0, version.digest):
                version = optimizer.publish(publisher).version
        if is_restarted:
            num_undone = ledger.rewind(step)
            log.info("resumed", extra={"step": step, "version": version.ordinal, "steps_undone": num_undone})
        ledger.add_version(version, step)
        gradient = BatchGradient(policy, config, base_model)
        rollout = config.rollout
        limits = RunnerLimits(
            rollout.groups_per_step, rollout.group_size, config.max_lag, rollout.max_rejected, rollout.stall_s
        )
        rings = [(Ring.attach(each["orders"]), Ring.attach(each["results"])) for each in links]
        for pair in rings:
            for ring in pair:
                stack.callback(ring.close)
        runner = RolloutRunner(
            task, [WorkerLink(RingWriter(orders), RingReader(results)) for orders, results in rings], ledger, limits,
            config.seed, incarnation, is_stopping,
        )  # fmt: skip
        metrics = MetricsWriter(run_dir, step, config.tensorboard)
        stack.callback(metrics.close)
        keeper = VersionKeeper(run_dir, config.checkpoint.keep_interval, policy.layout)
        parts = TrainParts(client, publisher, policy, optimizer, gradient, runner, ledger, metrics, keeper)
        yield TrainLoop(parts, config, run_dir, base_model, report, step)


def without_keys(config: TrainConfig) -> dict[str, Any]:
    """The configuration as it is recorded: the server's keys aren't anybody's business."""
    values = config.to_dict()
    return values | {"serve": without_secrets(values["serve"])}


def machine(policy: TrainablePolicy, is_exact: bool) -> dict[str, Any]:
    """What computes this run: whoever verifies it must know whether the same bits can be asked for."""
    found = describe()
    return {"is_exact": is_exact, **policy.describe(), "machine": found["machine"], "versions": found["versions"]}


def trainer_engine_config(config: TrainConfig) -> EngineConfig:
    """The engine's configuration with the trainer's threads; everything that decides bits is the engine's own."""
    cores = available_cores()
    threads = config.optimizer.num_threads or (cores if config.max_lag == 0 else max(1, cores // 2))
    torch.set_num_threads(threads)
    engine = config.serve.engine
    return replace(engine, runtime=replace(engine.runtime, num_threads=threads))
