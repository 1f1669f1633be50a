"""Entry point of a rollout worker's process: rings, task, tokenizer, client, then the loop. Started by bin/train."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

from ...ipc.async_client import AsyncClient
from ...ipc.client_config import ClientConfig
from ...ipc.ring import Ring, RingReader, RingWriter
from ..child import beat, run_child
from ..process import EXIT_OK, Parent
from ..trainer.config import TrainConfig
from .generator import RolloutGenerator
from .prompts import PromptRenderer
from .scorer import Scorer
from .tasks import load_task
from .worker import RolloutWorker

log = logging.getLogger(__name__)


def roll_out(parent: Parent) -> int:
    """Run one rollout worker; returns the exit code."""
    return asyncio.run(_run(parent))


async def _run(parent: Parent) -> int:
    # transformers is imported late, so that a refused start is quick.
    from transformers import AutoTokenizer

    config = TrainConfig.from_dict(parent.config["train"])
    beats = asyncio.create_task(beat(parent))
    loop = asyncio.get_running_loop()
    task = await asyncio.to_thread(load_task, config.task.source, config.task.rewards, config.task.options)
    tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, config.serve.model)
    orders = Ring.attach([parent.fds[f"orders.{part}"] for part in ("memory", "data", "space")])
    results = Ring.attach([parent.fds[f"results.{part}"] for part in ("memory", "data", "space")])
    scorer = Scorer(
        (config.task.source, config.task.rewards, config.task.options), config.rollout.reward_timeout_s,
        config.rollout.reward_attempts,
    )  # fmt: skip
    with orders, results:
        patience = ClientConfig(connect_s=config.serve.supervisor.start_s, return_s=config.serve.supervisor.start_s)
        async with await AsyncClient.connect(Path(config.serve.run_dir), role="rollout", config=patience) as client:
            generator = RolloutGenerator(client, PromptRenderer(tokenizer, config.task.system_prompt), config)
            worker = RolloutWorker(task, generator, scorer, (RingReader(orders), RingWriter(results)), config)
            work = asyncio.create_task(worker.run())
            loop.add_signal_handler(signal.SIGTERM, work.cancel)
            parent.report("ready", num_prompts=len(task.train))
            try:
                await work
            except asyncio.CancelledError:
                log.info("stopped")
            finally:
                await scorer.close()
                beats.cancel()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_child(roll_out))
