"""A real uvicorn in a thread, on a port that the system picks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

START_S = 20.0


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The base URL of `app` while it is served."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, lifespan="off", ws="none", log_level="error", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="uvicorn")
    thread.start()
    try:
        deadline_s = time.monotonic() + START_S
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline_s, "uvicorn didn't start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(START_S)
        assert not thread.is_alive()
