"""A GPU worker over its channel: requests, versions, bad input, slow and lost clients."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import zmq
from harness.serving import WorkerThread, wait_until
from harness.tiny_directory import write_tiny_directory
from harness.tiny_model import assert_baseline, tiny_spec, tiny_weights
from unison.ipc.arena.publisher import WeightPublisher
from unison.ipc.client import AsyncClient, Client, ClientConfig
from unison.ipc.errors import (
    ArenaError,
    CapacityError,
    ConfigError,
    DeadlineError,
    DigestMismatchError,
    HandshakeError,
    InvalidRequestError,
    PromptTooLongError,
    ShuttingDownError,
    UnknownVersionError,
    VersionBusyError,
    WorkerLostError,
)  # fmt: skip
from unison.ipc.messages import (
    CODEC,
    Failed,
    Hello,
    Ping,
    Pong,
    PublishWeights,
    RequestAccepted,
    RequestFinished,
    SubmitRequest,
    Welcome,
)  # fmt: skip
from unison.ipc.types import (
    ErrorReason,
    FinishReason,
    GenerateRequest,
    OnUpdate,
    PolicyVersion,
    SamplingParams,
    VersionSpan,
)  # fmt: skip

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=1.0, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_directory(directory)
    return directory


@pytest.fixture
def worker(tmp_path: Path, model: Path) -> Iterator[WorkerThread]:
    with WorkerThread(tmp_path / "r", model, {}) as running:
        yield running
        assert running.fault is None, running.fault


@pytest.fixture
def client(worker: WorkerThread) -> Iterator[Client]:
    with Client.connect(worker.run_dir) as connected:
        yield connected


def settled(worker: WorkerThread) -> None:
    """Nothing is held for anyone any more (S29)."""
    wait_until(lambda: not worker.engine.has_work, "an idle engine")
    wait_until(lambda: all(v.num_pins == 0 for v in worker.engine.versions), "no pins")
    assert_baseline(worker.engine)


def test_generate_equals_the_engine_in_process(worker: WorkerThread, client: Client) -> None:
    """S27, S10, R3: the channel changes nothing: same tokens, log-probs, versions and finish reason."""
    through = client.generate([5, 6, 7], SamplingParams(max_tokens=20, seed=3), n=3)
    (here,) = worker.engine.run_batch([[5, 6, 7]], SamplingParams(max_tokens=20, seed=3), n=3)
    assert through.completions == here.completions


def test_stream_adds_up_to_the_result(client: Client) -> None:
    """R1: deltas without a gap, one terminal delta per completion, and the same tokens as the result."""
    stream = client.stream([5, 6, 7], SamplingParams(max_tokens=20, seed=3), n=2)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    endings = []
    for deltas in stream:
        for delta in deltas:
            assert delta.first == len(tokens[delta.index])
            tokens[delta.index] += delta.token_ids
            endings += [delta.index] if delta.finish_reason else []
    assert stream.output is not None
    assert [tuple(tokens[index]) for index in (0, 1)] == [c.token_ids for c in stream.output.completions]
    assert sorted(endings) == [0, 1]


def test_score_equals_the_engine(worker: WorkerThread, client: Client) -> None:
    assert client.score([5, 6], [7, 8, 9], top_k=2) == worker.engine.score([5, 6], [7, 8, 9], top_k=2)


def test_one_client_from_many_threads(client: Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        outputs = list(
            pool.map(lambda seed: client.generate([seed + 4], SamplingParams(max_tokens=5, seed=seed)), range(24))
        )
    again = client.generate_all([[seed + 4] for seed in range(4)], SamplingParams(max_tokens=5, seed=0))
    assert len({output.request_id for output in outputs}) == 24
    assert again[0].completions == outputs[0].completions


@pytest.mark.parametrize(
    ("prompt", "options", "error", "says"),
    [
        ([5] * 600, {}, PromptTooLongError, "600 tokens"),
        ([160], {}, InvalidRequestError, "vocabulary"),
        ([5], {"pin_version": 7}, UnknownVersionError, "7"),
        ([], {}, InvalidRequestError, "empty"),
    ],
)
def test_bad_requests_get_typed_errors(
    worker: WorkerThread, client: Client, prompt: list[int], options: dict[str, int], error: type[Exception], says: str
) -> None:
    """S8, S29, R2: refused by name, on this side or on the other, before anything is taken, and nothing is held."""
    with pytest.raises(error, match=says):
        client.generate(prompt, **options)
    settled(worker)


def test_leaving_a_stream_frees_its_slot(worker: WorkerThread, client: Client) -> None:
    """S29, P42: leaving the loop ends the request at the worker; rows, KV and metrics are given back."""
    for _ in client.stream([5], LONG):
        break
    settled(worker)
    assert worker.engine.stats().num_completions_by_reason[FinishReason.ABORTED] == 1


def test_abort_gives_the_terminal_event_to_its_own_call(client: Client) -> None:
    """R1: who waits for the request gets what there was, with the reason."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, [5], LONG, request_id="mine")
        wait_until(lambda: client.status().num_running, "the request to run")
        assert client.abort("mine")
        (completion,) = waiting.result(30).completions
    assert (completion.finish_reason, completion.error) == (FinishReason.ABORTED, ErrorReason.CANCELLED)
    assert not client.abort("mine")


def test_a_client_cannot_cancel_anothers_request(worker: WorkerThread, client: Client) -> None:
    with Client.connect(worker.run_dir) as other, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, [5], SamplingParams(max_tokens=100, ignore_eos=True), request_id="mine")
        wait_until(lambda: other.status().num_running, "the request to run")
        assert not other.abort("mine")
        assert waiting.result(30).completions[0].finish_reason is FinishReason.LENGTH


def test_pause_keeps_everything_and_resume_goes_on(client: Client) -> None:
    """P38, P16: pausing twice or with an empty batch is fine; a paused request goes on where it was."""
    expected = client.generate([5, 9], LONG)
    client.pause()
    client.pause()
    assert client.status().is_paused
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, [5, 9], LONG)
        wait_until(lambda: client.status().num_waiting, "the request to be there")
        client.resume()
        assert waiting.result(30).completions == expected.completions


def test_a_request_lives_as_long_as_its_worker_gives_signs_of_life(worker: WorkerThread) -> None:
    """P37: no global time-out kills a long request: only a deadline that was asked for, or a worker that is silent."""
    impatient = ClientConfig(call_s=0.2, ping_s=0.1, tick_s=0.05, silence_s=1.0)
    with Client.connect(worker.run_dir, config=impatient) as client, ThreadPoolExecutor(1) as pool:
        client.pause()
        waiting = pool.submit(client.generate, [5], GREEDY)
        until = time.monotonic() + 2 * impatient.silence_s
        wait_until(lambda: time.monotonic() > until or waiting.done(), "more than any time-out")
        assert not waiting.done()
        client.resume()
        assert waiting.result(30).completions[0].finish_reason is FinishReason.LENGTH


def test_what_cannot_be_done_is_an_error_not_an_ok(client: Client) -> None:
    """P04: releasing what is live, rolling back to what isn't there, unpinning what isn't pinned: refused, typed."""
    with pytest.raises(VersionBusyError, match="0 is live"):
        client.release(0)
    with pytest.raises(UnknownVersionError):
        client.rollback(3)
    with pytest.raises(UnknownVersionError):
        client.pin(3)
    with pytest.raises(ArenaError):
        client.abandon_buffer(1)


def test_a_worker_built_inside_inference_mode(tmp_path: Path, model: Path) -> None:
    """S11, S12, S10: whoever builds the worker, and in which mode, its weights and buffers are ordinary tensors, and
    the thread that runs the loop may write them."""
    with torch.inference_mode():
        running = WorkerThread(tmp_path / "r", model, {})
    assert not running.arena.flat(0).is_inference()
    assert not any(tensor.is_inference() for tensor in running.engine._parts.buffer.layer(0))
    with running, Client.connect(running.run_dir) as client:
        for _ in range(2):
            output = client.generate([5], SamplingParams(max_tokens=16, ignore_eos=True))
            assert len(output.completions[0].token_ids) == 16
    assert running.fault is None


def test_cancel_while_paused_is_reported(client: Client) -> None:
    client.pause()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, [5], LONG, request_id="mine")
        wait_until(lambda: client.status().num_waiting, "the request to be there")
        assert client.abort("mine")
        assert waiting.result(30).completions[0].error is ErrorReason.CANCELLED
    client.resume()


def test_publish_goes_live_and_reads_the_publishers_bytes(worker: WorkerThread, client: Client) -> None:
    """V1, V2, S2, S26: ordinal plus digest is the version, and the engine computes with the very bytes written."""
    new = tiny_weights(tiny_spec(), seed=1)
    before = client.generate([5, 6], GREEDY)
    with WeightPublisher(client) as publisher:
        live = publisher.publish(new)
        assert live.version == PolicyVersion(1, worker.arena.manifest(1).digest)
        after = client.generate([5, 6], GREEDY)
        assert after.completions[0].versions == (VersionSpan(1, 0, 12),)
        assert before.completions[0].token_ids != after.completions[0].token_ids
        assert client.rollback(0).ordinal == 0
        assert client.generate([5, 6], GREEDY).completions[0].token_ids == before.completions[0].token_ids
        again = publisher.publish(new)
    assert again.version == PolicyVersion(2, live.version.digest), "ordinals only grow, the content is the same"
    assert worker.arena.header.highest_ordinal == 2


def test_no_prefix_hit_across_an_update(client: Client) -> None:
    """V4, S26, P01, P03: the same prompt after an update is computed anew, under the new version."""
    prompt = [5 + at % 90 for at in range(64)]
    client.generate(prompt, GREEDY)
    assert client.generate(prompt, GREEDY).num_cached_tokens > 0
    with WeightPublisher(client) as publisher:
        publisher.publish(tiny_weights(tiny_spec(), seed=1))
    output = client.generate(prompt, GREEDY)
    assert output.num_cached_tokens == 0
    assert {span.version for span in output.completions[0].kv_versions} == {1}


def test_a_changed_byte_is_refused_and_named(worker: WorkerThread, client: Client) -> None:
    """V1, V5, P12, P15: bytes that changed after the seal are refused; the old version serves on."""
    with WeightPublisher(client) as publisher:
        with pytest.raises(DigestMismatchError, match="model.norm.weight") as caught, publisher.update() as update:
            for name, tensor in tiny_weights(tiny_spec(), seed=1).items():
                update.tensors[name].copy_(tensor)
            version, manifest = publisher.arena.seal(update.buffer, update.ordinal)
            update.tensors["model.norm.weight"][3] += 1
            client.publish(version, update.buffer, manifest)
        assert caught.value.tensors == ("model.norm.weight",)
        assert client.status().versions[0].version.ordinal == 0
        assert publisher.publish(tiny_weights(tiny_spec(), seed=1)).version.ordinal == 1


def test_an_abandoned_update_changes_nothing(client: Client) -> None:
    """V5, P13: a failure in the middle of writing publishes nothing, and the buffer can be had again."""
    with WeightPublisher(client) as publisher:
        with pytest.raises(RuntimeError, match="half-way"), publisher.update() as update:
            update.tensors["model.norm.weight"].zero_()
            raise RuntimeError("half-way")
        assert [item.version.ordinal for item in client.status().versions] == [0]
        assert publisher.publish(tiny_weights(tiny_spec(), seed=2)).version.ordinal == 1


def test_publishing_needs_a_reservation_and_retries_act_once(client: Client) -> None:
    """S8, P29, P38: the same publication twice is one; one without a reservation is refused."""
    with WeightPublisher(client) as publisher:
        live = publisher.publish(tiny_weights(tiny_spec(), seed=1))
        manifest = publisher.arena.manifest(1)
        assert client.publish(live.version, 1, manifest).version == live.version
        with pytest.raises(ArenaError, match="reserve"):
            client.publish(PolicyVersion(5, manifest.digest), 0, manifest)
    assert client.status().counters["num_flips"] == 1


def test_pins_keep_a_version_and_go_with_their_client(worker: WorkerThread, client: Client) -> None:
    """P45: an evaluation pins its version; new versions wait for a buffer, and the pin ends with its client."""
    with WeightPublisher(client) as publisher:
        with Client.connect(worker.run_dir) as evaluation:
            evaluation.pin(0)
            publisher.publish(tiny_weights(tiny_spec(), seed=1))
            assert evaluation.generate([5], GREEDY, pin_version=0).completions[0].versions[0].version == 0
            with pytest.raises(VersionBusyError, match="0 .draining, 1 pins"):
                client.reserve_buffer(0.0)
            with pytest.raises(InvalidRequestError, match="hasn't pinned"):
                client.unpin(0)
        assert publisher.publish(tiny_weights(tiny_spec(), seed=2), wait_s=30).version.ordinal == 2


@pytest.mark.parametrize("rule", list(OnUpdate))
def test_each_update_rule_in_flight(worker: WorkerThread, client: Client, rule: OnUpdate) -> None:
    """V3, P07: what a request in flight does at a flip is its own rule, and its spans say what happened."""
    with WeightPublisher(client) as publisher, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, [5, 6], LONG, on_update=rule)
        wait_until(lambda: client.status().counters["num_decode_tokens"] > 3, "some tokens")
        publisher.publish(tiny_weights(tiny_spec(), seed=1))
        (completion,) = waiting.result(60).completions
    versions = [span.version for span in completion.versions]
    if rule is OnUpdate.ABORT:
        assert (completion.finish_reason, completion.error) == (FinishReason.ABORTED, ErrorReason.POLICY_UPDATED)
    else:
        assert completion.finish_reason is FinishReason.LENGTH
    assert versions == {OnUpdate.FINISH: [0], OnUpdate.ABORT: [0]}.get(rule, [0, 1])
    settled(worker)


# ---- other people's clients ------------------------------------------------------------------------------------------


class RawClient:
    """A DEALER that says whatever it likes."""

    def __init__(self, worker: WorkerThread, hwm: int = 1000) -> None:
        self.address = worker.address
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, hwm)
        self.socket.connect(worker.address.endpoint)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()

    def send(self, call_id: int, message: object, lane: bytes = b"c") -> None:
        self.socket.send_multipart((lane, CODEC.encode(call_id, message)))

    def hello(self, **changes: object) -> object:
        fields = {"schema": CODEC.schema_digest, "token": self.address.token, "role": "user", "pid": os.getpid(),
                  "epoch": self.address.epoch} | changes  # fmt: skip
        self.send(1, Hello(**fields))  # type: ignore[arg-type]
        return self.receive()[1]

    def receive(self, deadline_s: float = 30.0) -> tuple[int, object]:
        assert self.socket.poll(int(deadline_s * 1000)), "no answer"
        return CODEC.decode(self.socket.recv_multipart()[-1])


@pytest.mark.parametrize(
    ("changes", "says"), [({"token": "0" * 32}, "token"), ({"schema": "0" * 32}, "schema"), ({"epoch": "old"}, "epoch")]
)
def test_strangers_are_refused(worker: WorkerThread, changes: dict[str, str], says: str) -> None:
    """P43, P39: a wrong token, schema or epoch is refused with the reason."""
    with RawClient(worker) as raw:
        refused = raw.hello(**changes)
        assert isinstance(refused, Failed) and refused.code == "handshake_refused" and says in refused.message
        raw.send(2, Ping())
        assert isinstance(raw.receive()[1], Failed), "still not welcome"


def test_a_retried_call_acts_once(worker: WorkerThread) -> None:
    """P2, P29: the same call id twice: one request runs, both ask-and-answer pairs agree."""
    request = GenerateRequest("r", (5, 6), SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
    with RawClient(worker) as raw:
        assert isinstance(raw.hello(), Welcome)
        for _ in range(2):
            raw.send(7, SubmitRequest(request, False), b"r")
        seen = [raw.receive() for _ in range(2)]
        assert [type(message) for _, message in seen] == [RequestAccepted, RequestFinished]
        raw.send(7, SubmitRequest(request, False), b"r")
        assert raw.receive() == seen[1]
    assert worker.engine.stats().num_requests_submitted == 1


def test_control_overtakes_queued_requests(worker: WorkerThread) -> None:
    """A burst of requests doesn't keep a cancellation or a ping waiting behind it."""
    with RawClient(worker) as raw:
        raw.hello()
        for at in range(2000):
            request = GenerateRequest(f"r{at}", (5, 6), SamplingParams(max_tokens=200, seed=1, ignore_eos=True))
            raw.send(10 + at, SubmitRequest(request, False), b"r")
        raw.send(5, Ping())
        while not isinstance(message := raw.receive()[1], Pong):
            assert isinstance(message, RequestAccepted)
        assert worker.engine.stats().num_requests_submitted < 2000


def test_a_full_queue_is_refused(tmp_path: Path, model: Path) -> None:
    """Finite queues: what doesn't fit is told so, and what fitted is served."""
    with WorkerThread(tmp_path / "r", model, {}, max_queued_requests=10, admit_per_turn=1) as worker:
        with Client.connect(worker.run_dir) as client:
            client.pause()

            async def flood() -> list[object]:
                raw = [client._client.generate([5], SamplingParams(max_tokens=2, seed=1)) for _ in range(200)]
                work = asyncio.gather(*raw, return_exceptions=True)
                await asyncio.sleep(0)
                await client._client.resume()
                return await work

            outcomes = client._wait(flood())
        refused = [outcome for outcome in outcomes if isinstance(outcome, CapacityError)]
        assert len(refused) < 200 and all("max_queued_requests" in str(error) for error in refused)
        settled(worker)


def test_a_slow_client_is_aborted_and_told(tmp_path: Path, model: Path) -> None:
    """A client that doesn't read is aborted, everybody else goes on, and its terminal events wait for it (R1)."""
    with WorkerThread(tmp_path / "r", model, {}, send_queue_messages=1) as worker:
        with RawClient(worker, hwm=1) as raw, Client.connect(worker.run_dir) as client:
            raw.hello()
            ids = [f"slow{at}" for at in range(40)]
            for at, request_id in enumerate(ids):
                request = GenerateRequest(request_id, (5,), SamplingParams(max_tokens=500, seed=at, ignore_eos=True,
                                          logprobs=8), n=2)  # fmt: skip
                raw.send(10 + at, SubmitRequest(request, True), b"r")
            done = {}
            wait_until(lambda: any(peer.is_slow for peer in worker.worker._peers), "the slow client to be noticed", 120)
            assert client.generate([5], GREEDY).completions[0].finish_reason is FinishReason.LENGTH
            while len(done) < len(ids):
                call_id, message = raw.receive()
                if isinstance(message, RequestFinished):
                    done[call_id] = message.output
                elif isinstance(message, Failed):
                    done[call_id] = None
            reasons = {c.error for output in done.values() if output for c in output.completions}
            assert ErrorReason.CLIENT_TOO_SLOW in reasons
        settled(worker)


def test_a_killed_client_is_noticed(worker: WorkerThread, client: Client) -> None:
    """P34, P42: the death of a client's process ends its requests at once, pins and reservations included."""
    script = (
        "import sys; from unison.ipc.client import Client; from unison.ipc.types import SamplingParams\n"
        f"c = Client.connect({str(worker.run_dir)!r}); c.pin(0); c.reserve_buffer(0)\n"
        "for d in c.stream([5], SamplingParams(max_tokens=400, ignore_eos=True)):\n    print(len(d), flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        child.kill()
    started = time.monotonic()
    settled(worker)
    assert time.monotonic() - started < 10
    assert client.reserve_buffer(0.0).buffer == 1
    client.abandon_buffer(1)


def test_drain_finishes_what_runs_and_takes_nothing_new(tmp_path: Path, model: Path) -> None:
    with WorkerThread(tmp_path / "r", model, {}) as worker, Client.connect(worker.run_dir) as client:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.generate, [5], LONG)
            wait_until(lambda: client.status().num_running, "the request to run")
            worker.worker.stop(30.0)
            with pytest.raises((ShuttingDownError, WorkerLostError)):
                client.generate([5], GREEDY)
            assert waiting.result(60).completions[0].finish_reason is FinishReason.LENGTH


def test_stop_without_drain_tells_everyone(tmp_path: Path, model: Path) -> None:
    """R1: a request that can't be finished within the drain time gets its terminal event."""
    with WorkerThread(tmp_path / "r", model, {}) as worker, Client.connect(worker.run_dir) as client:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.generate, [5], LONG)
            wait_until(lambda: client.status().num_running, "the request to run")
            worker.worker.stop(0.0)
            (completion,) = waiting.result(30).completions
    assert (completion.finish_reason, completion.error) == (FinishReason.ABORTED, ErrorReason.SHUTDOWN)


def test_a_fault_ends_the_worker_with_terminal_events(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P35, P36: a broken step is never a silent loop: the requests are told, the loop ends with the fault."""
    with WorkerThread(tmp_path / "r", model, {}) as worker, Client.connect(worker.run_dir) as client:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.generate, [5], LONG)
            wait_until(lambda: client.status().num_running, "the request to run")

            def broken(*_: object) -> None:
                raise MemoryError("no memory for the workspace")

            monkeypatch.setattr(worker.engine._parts.stepper._executor, "run", broken)
            (completion,) = waiting.result(30).completions
        assert (completion.finish_reason, completion.error) == (FinishReason.ERROR, ErrorReason.INTERNAL)
        assert isinstance(wait_until(lambda: worker.fault, "the loop to end"), MemoryError)


def test_deadlines_say_what_was_waited_for(worker: WorkerThread, client: Client) -> None:
    """P2, P36: a call's deadline ends it here and at the worker."""
    client.pause()
    with pytest.raises(DeadlineError, match="request '.*' wasn't answered within 0.[0-9]"):
        client.generate([5], GREEDY, deadline_s=0.3)
    client.resume()
    settled(worker)
    with pytest.raises(DeadlineError, match="no worker in .* answered"):
        Client.connect(worker.run_dir / "nowhere", config=ClientConfig(connect_s=0.2))
    with pytest.raises(ConfigError, match="run_dir: is empty"):
        Client.connect("")


def test_importing_the_client_loads_no_torch() -> None:
    code = "import sys, unison.ipc.client; print('torch' in sys.modules, 'zmq' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.strip() == "False True"


def test_a_client_inside_inference_mode(client: Client) -> None:
    """S11: whoever builds or calls a client inside inference mode gets what anybody gets."""
    with torch.inference_mode():
        assert len(client.generate([5], GREEDY).completions[0].token_ids) == 12


def test_async_tasks_that_are_cancelled_cancel_their_request(worker: WorkerThread) -> None:
    """P42: asyncio cancellation reaches the worker."""

    async def run() -> None:
        async with await AsyncClient.connect(worker.run_dir) as client:
            task = asyncio.create_task(client.generate([5], LONG))
            while not (await client.status()).num_running:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            while (await client.status()).num_running:
                await asyncio.sleep(0.001)

    asyncio.run(run())
    settled(worker)


def test_a_request_of_a_wrong_type_on_the_lane(worker: WorkerThread) -> None:
    with RawClient(worker) as raw:
        raw.hello()
        raw.send(3, Ping(), b"r")
        call_id, refused = raw.receive()
        assert (call_id, type(refused)) == (3, Failed) and "lane" in refused.message  # type: ignore[attr-defined]
        raw.socket.send_multipart((b"c", b"\xc1nonsense"))
        raw.socket.send_multipart((b"x",))
        raw.send(4, PublishWeights(PolicyVersion(1, "0" * 32), 9, worker.arena.manifest(0)))
        assert isinstance(raw.receive()[1], Failed)
    with pytest.raises(HandshakeError, match="mode"):
        worker.run_dir.chmod(0o755)
        Client.connect(worker.run_dir)
    worker.run_dir.chmod(0o700)
