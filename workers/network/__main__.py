"""Entry point of the HTTP server's process: a client of the worker, the application, uvicorn on an inherited socket."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from ...ipc.async_client import AsyncClient, ClientConfig
from ...ipc.types import SamplingParams
from ..child import beat, run_child
from ..config import ServeConfig
from ..process import EXIT_OK, Parent
from .settings import NetworkSettings

log = logging.getLogger(__name__)


def serve(parent: Parent) -> int:
    """Run one server; returns the exit code."""
    # uvicorn takes the signal over while it serves, and hands it on when it is done; nothing is left to do then.
    signal.signal(signal.SIGTERM, lambda *_: None)
    asyncio.run(_serve(parent))
    return EXIT_OK


async def _serve(parent: Parent) -> None:
    import uvicorn

    from .app import create_app

    config = ServeConfig.from_dict(parent.config["serve"])
    tokenizer = _tokenizer(Path(config.model))
    client_config = ClientConfig(silence_s=config.supervisor.hang_s, return_s=config.supervisor.start_s)
    async with await AsyncClient.connect(config.run_dir, role="server", config=client_config) as client:
        app = create_app(client, tokenizer, network_settings(config))
        settings = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", server_header=False,
            timeout_graceful_shutdown=max(1, int(config.supervisor.drain_s)),
        )  # fmt: skip
        server = uvicorn.Server(settings)
        await client.generate((0,), SamplingParams(max_tokens=1, temperature=0), deadline_s=60.0, resubmit=True)
        beating = asyncio.create_task(beat(parent))
        listening = socket.socket(fileno=parent.fds["listen"])
        try:
            parent.report("ready")
            log.info("ready", extra={"address": str(listening.getsockname())})
            await server.serve(sockets=[listening])
        finally:
            beating.cancel()
    log.info("stopped")


def network_settings(config: ServeConfig) -> NetworkSettings:
    """The server's settings from the run's configuration, keys from the environment included."""
    network = config.network
    keys = [key for key in (network.api_key, os.environ.get("UNISON_API_KEY")) if key]
    return NetworkSettings(
        model_name=config.name,
        api_keys=tuple(keys),
        admin_key=network.admin_key or os.environ.get("UNISON_ADMIN_KEY") or None,
        max_concurrent=network.max_concurrent,
        max_body_bytes=network.max_body_bytes,
        request_timeout_s=network.request_timeout_s,
        progress_age_s=network.progress_age_s,
    )


def _tokenizer(directory: Path) -> Any:
    # transformers takes a second to import, so only the process that needs it does.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


if __name__ == "__main__":
    sys.exit(run_child(serve))
