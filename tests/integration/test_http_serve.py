"""bin/serve over HTTP on the real model: limits, keys, disconnects, versions, and deaths behind the connection."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.serving import ServeProcess, serving, wait_until
from unison.ipc.arena.publisher import WeightPublisher
from unison.ipc.client import Client

pytestmark = [pytest.mark.slow]

MODEL = "smollm2-135m"
BACK_S = 30.0
KEYS = {"authorization": "Bearer user-key"}
ADMIN = {"authorization": "Bearer admin-key"}
OPTIONS = (
    "--served-name", MODEL, "--port", "0", "--set", "engine.cache.num_tokens=16384", "--set",
    "network.max_concurrent=4", "--set", "network.max_body_bytes=20000",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    os.environ |= {"UNISON_API_KEY": "user-key", "UNISON_ADMIN_KEY": "admin-key"}
    try:
        with serving(tmp_path_factory.mktemp("serve") / "r", model_dir, *OPTIONS) as process:
            yield process
    finally:
        del os.environ["UNISON_API_KEY"], os.environ["UNISON_ADMIN_KEY"]


@pytest.fixture(scope="module")
def hasty_run(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A server without a key for its users, which gives each request a second."""
    options = ("--served-name", MODEL, "--port", "0", "--set", "engine.cache.num_tokens=16384",
               "--set", "network.request_timeout_s=1")  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("UNISON_API_KEY", raising=False)
        patch.setenv("UNISON_ADMIN_KEY", "admin-key")
        with serving(tmp_path_factory.mktemp("hasty") / "r", model_dir, *options) as process:
            yield process


@pytest.fixture
def http(run: ServeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=run.url, headers=KEYS, timeout=60) as client:
        wait_until(lambda: client.get("/ready").status_code == 200, "the server to be ready")
        yield client


def ask(max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A completion of a fixed prompt, greedy unless told otherwise, that doesn't end early."""
    body = {"model": MODEL, "prompt": "The river", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return body | fields


def test_errors_name_what_the_client_sent(http: httpx.Client) -> None:
    """A refused pin is told of in HTTP's words, not in the worker's."""
    refused = http.post("/v1/policy/unpin", json={"version": 0}, headers=ADMIN)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "version" and error["message"].startswith("version: is 0")


def stream_text(http: httpx.Client, body: dict[str, Any], after: int = -1, then: Any = None) -> str:
    """Text of a streamed completion; calls `then` once after `after` chunks."""
    text = ""
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        for number, line in enumerate(response.iter_lines()):
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["text"]
            if number == after:
                then()
    return text


def test_keys_and_limits(http: httpx.Client, run: ServeProcess) -> None:
    """P43: no key 401, no admin key 401 or 403, a long body 413, an unknown model or path 404, bad input 400, in the
    provider's shape."""
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = httpx.post(f"{run.url}/v1/completions", json=ask(), headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["message"]
    assert http.post("/v1/policy/pause", json={}).status_code in (401, 403)
    assert http.post("/v1/completions", json=ask(prompt="x" * 30_000)).status_code == 413
    assert http.post("/v1/completions", json=ask(model="other")).status_code == 404
    assert http.get("/v1/nothing").status_code == 404
    assert http.post("/v1/completions", json=ask(max_tokens=-1)).status_code == 400
    assert http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}).status_code == 400


def test_too_many_at_once_get_429(http: httpx.Client, run: ServeProcess) -> None:
    """A bounded queue: who finds it full is told when to come back, and what was accepted is served."""
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: http.post("/v1/completions", json=ask(24)), range(12)))
    statuses = sorted(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429} and statuses.count(200) >= 4
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
    assert run.popen.poll() is None


def test_a_request_that_takes_too_long_gets_408(hasty_run: ServeProcess) -> None:
    """The time limit of a request: 408, and the next one is served."""
    with httpx.Client(base_url=hasty_run.url, headers=ADMIN, timeout=60) as http:
        assert http.post("/v1/policy/pause", json={}).status_code == 200
        try:
            assert http.post("/v1/completions", json=ask()).status_code == 408
        finally:
            assert http.post("/v1/policy/resume", json={}).status_code == 200
        wait_until(lambda: http.post("/v1/completions", json=ask(1)).status_code == 200, "an answer in time")


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_disconnect_frees_the_slot(run: ServeProcess, http: httpx.Client, is_streamed: bool) -> None:
    """P42: who goes away, in the middle of a stream or of a plain request, is cancelled at the worker."""
    body = json.dumps(ask(4000, stream=is_streamed)).encode()
    host, port = run.url.removeprefix("http://").split(":")
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer user-key\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with Client.connect(run.run_dir) as client:
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            wait_until(lambda: client.status().num_running, "the request to run")
        wait_until(lambda: not client.status().num_running, "the slot to be free")


def test_versions_in_headers_and_policy(run: ServeProcess, http: httpx.Client) -> None:
    """V3, P07, S26: what was published is what answers say made them; the policy endpoints see and change it."""
    first = http.post("/v1/completions", json=ask())
    assert first.headers["x-unison-version"] == "0"
    with Client.connect(run.run_dir) as client, WeightPublisher(client) as publisher:
        with publisher.update() as update:
            for name, tensor in publisher.arena.tensors(publisher.arena.flat(0)).items():
                update.tensors[name].copy_(tensor)
            update.tensors["model.norm.weight"].mul_(1.5)
        assert update.live is not None
        second = http.post("/v1/completions", json=ask())
        assert second.headers["x-unison-version"] == "1"
        assert second.headers["x-unison-digest"] == update.live.version.digest
        policy = http.get("/v1/policy").json()
        assert policy["live"]["version"] == 1, policy
        assert http.post("/v1/policy/rollback", json={"version": 0}, headers=ADMIN).status_code == 200
        assert http.post("/v1/policy/rollback", json={"version": 9}, headers=ADMIN).status_code == 404
    assert http.post("/v1/completions", json=ask()).json()["choices"][0]["text"] == first.json()["choices"][0]["text"]


def test_a_stream_survives_its_worker(run: ServeProcess, http: httpx.Client) -> None:
    """P3, R3: the worker is killed under a stream; the reader gets the very text that it would have got."""
    expected = stream_text(http, ask(120))
    old, started = run.worker_pid, time.monotonic()
    text = stream_text(http, ask(120), 40, lambda: os.kill(old, signal.SIGKILL))
    assert text == expected and time.monotonic() - started < BACK_S + 10
    assert run.worker_pid != old


def test_health_is_bad_while_the_worker_hangs(run: ServeProcess, http: httpx.Client) -> None:
    """P35: /health asks the engine: bad while it is stopped, good again after its replacement."""
    assert http.get("/health").status_code == 200
    old, started = run.worker_pid, time.monotonic()
    os.kill(old, signal.SIGSTOP)
    wait_until(lambda: http.get("/health").status_code == 503, "bad health")
    wait_until(lambda: http.get("/health").status_code == 200, "good health")
    assert time.monotonic() - started < BACK_S + 5
    assert http.post("/v1/completions", json=ask()).status_code == 200 and run.worker_pid != old


def test_the_server_comes_back_on_its_port(run: ServeProcess, http: httpx.Client) -> None:
    """P3: a killed server takes its connections with it and nothing else; a new one serves on the same port."""
    with Client.connect(run.run_dir) as client:
        old, worker = run.pids()["network"], run.worker_pid
        failed = threading.Event()

        def long_request() -> None:
            with pytest.raises(httpx.HTTPError):
                http.post("/v1/completions", json=ask(2000))
            failed.set()

        thread = threading.Thread(target=long_request)
        thread.start()
        wait_until(lambda: client.status().num_running, "the request to run")
        started = time.monotonic()
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: not client.status().num_running, "its requests to be gone")
        thread.join()
        assert failed.is_set()
        with httpx.Client(base_url=run.url, headers=KEYS, timeout=30) as again:
            assert again.post("/v1/completions", json=ask()).status_code == 200
        assert time.monotonic() - started < BACK_S
        assert run.worker_pid == worker and run.pids()["network"] != old


def test_metrics(http: httpx.Client) -> None:
    """Prometheus text with the engine's own numbers."""
    http.post("/v1/completions", json=ask())
    samples = {line.split()[0]: float(line.split()[1]) for line in http.get("/metrics").text.splitlines()
               if not line.startswith("#")}  # fmt: skip
    assert samples["unison_up"] == 1 and samples["unison_live_version"] == 0
    assert any("generated_tokens" in name and value > 0 for name, value in samples.items())


def test_fuzzing_against_its_own_openapi(hasty_run: ServeProcess, tmp_path: Path) -> None:
    """P43: schemathesis against the server's own description of itself: no 5xx, no hang, the server lives on."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{hasty_run.url}/openapi.json", "--phases", "fuzzing",
        "--max-examples", "8", "--checks", "not_a_server_error", "--seed", "1", "--request-timeout", "30",
        "--generation-database", "none", "--continue-on-failure", "--exclude-path-regex", "/v1/policy/p.*",
        "-H", "x-api-key: admin-key",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    url = f"{hasty_run.url}/v1/completions"
    wait_until(lambda: httpx.post(url, json=ask(1), timeout=60).status_code == 200, "an answer in time")
    assert hasty_run.pids().keys() >= {"gpu", "network", "janitor"}
