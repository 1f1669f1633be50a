"""The server over a tiny random model with one token per byte: real HTTP, real engine, milliseconds per request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx
import pytest
from harness.byte_tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, byte_tokenizer
from harness.engine_backend import EngineBackend
from harness.http_server import serving
from harness.tiny_model import tiny_engine, tiny_spec
from unison.workers.network.app import create_app
from unison.workers.network.settings import NetworkSettings

DEADLINE_S = 20.0

Serve = Callable[..., AbstractContextManager[httpx.Client]]


@pytest.fixture(scope="module")
def backend() -> Iterator[EngineBackend]:
    engine = tiny_engine(spec=tiny_spec(vocab_size=VOCAB_SIZE), cache={"num_tokens": 4096, "block_size_tokens": 8})
    started = EngineBackend(engine).start()
    yield started
    started.stop()


@pytest.fixture
def serve(backend: EngineBackend) -> Serve:
    """Serves with settings of one's own: `with serve(api_keys=("k",)) as http:`."""

    @contextmanager
    def with_settings(chat_template: str | None = CHAT_TEMPLATE, **settings: Any) -> Iterator[httpx.Client]:
        app = create_app(backend, byte_tokenizer(chat_template), NetworkSettings(**settings))
        with serving(app) as url, httpx.Client(base_url=url, timeout=60) as client:
            yield client

    return with_settings


@pytest.fixture(scope="module")
def url(backend: EngineBackend) -> Iterator[str]:
    with serving(create_app(backend, byte_tokenizer())) as base_url:
        yield base_url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, "it never held"
        time.sleep(0.005)
