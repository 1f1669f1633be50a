"""The application over real HTTP: what is answered, what is refused, and in whose words."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from harness.byte_tokenizer import BYTES_FROM, ids_of
from harness.engine_backend import EngineBackend
from harness.tiny_model import tiny_weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unison.ipc.errors import ERROR_CODES, ErrorCode, UnisonError
from unison.ipc.types import SamplingParams
from unison.workers.network.app import ENDPOINTS
from unison.workers.network.openapi import ANSWERS
from unison.workers.network.replies import TYPES_BY_STATUS

from .conftest import Serve, eventually

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "seed": 1}
IMAGE = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
ONLY_A = {"allowed_token_ids": ids_of("a")}


def ask(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", path, json=body | {"stream": True}) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_chat_whole_and_streamed_are_the_same(http: httpx.Client) -> None:
    whole = ask(http, "/v1/chat/completions", CHAT | {"n": 3})
    chunks = events(http, "/v1/chat/completions", CHAT | {"n": 3, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        own = [entry for chunk in chunks for entry in chunk["choices"] if entry["index"] == choice["index"]]
        assert "".join(entry["delta"].get("content", "") for entry in own) == choice["message"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"] and own[-1]["unison"] == choice["unison"]
    texts = {choice["message"]["content"] for choice in whole["choices"]}
    assert len(texts) == 3, "members of a group differ (R3)"


def test_tokens_are_those_of_the_engine(http: httpx.Client, backend: EngineBackend) -> None:
    """What HTTP gives is what the engine gives for the same ids, parameters and seed."""
    prompt = ids_of("Hello")
    (expected,) = backend.engine.run_batch([prompt], SamplingParams(max_tokens=8, seed=5), n=2)
    body = {"prompt": prompt, "max_tokens": 8, "seed": 5, "n": 2, "unison": True, "logprobs": 2}
    answer = ask(http, "/v1/completions", body)
    for choice, completion in zip(answer["choices"], expected.completions, strict=True):
        assert tuple(choice["unison"]["token_ids"]) == completion.token_ids
        assert tuple(choice["unison"]["logprobs"]) == completion.logprobs
        assert choice["unison"]["versions"] == [[0, 0, len(completion.token_ids)]]
        assert choice["unison"]["seed"] == 5
        shown = [value for token, value in zip(completion.token_ids, completion.raw_logprobs, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == shown[: len(choice["logprobs"]["tokens"])]
    assert answer["usage"]["prompt_tokens"] == len(prompt)


def test_version_is_in_the_headers(http: httpx.Client, backend: EngineBackend) -> None:
    reply = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    live = backend.engine.live_version
    assert reply.headers["x-unison-version"] == str(live.ordinal)
    assert reply.headers["x-unison-digest"] == live.digest
    assert len(reply.headers["x-request-id"]) == 24


def test_a_drawn_seed_is_told_and_repeats_the_answer(http: httpx.Client) -> None:
    first = ask(http, "/v1/completions", {"prompt": "x", "max_tokens": 12, "unison": True})["choices"][0]
    seed = first["unison"]["seed"]
    again = ask(http, "/v1/completions", {"prompt": "x", "max_tokens": 12, "unison": True, "seed": seed})["choices"][0]
    assert first == again


@pytest.mark.parametrize("is_streamed", [False, True])
def test_stop_strings_cut_across_tokens(http: httpx.Client, is_streamed: bool, backend: EngineBackend) -> None:
    """The text ends before the stop string, tokens are counted up to it, and the engine is free again."""
    body = ONLY_A | {"prompt": "x", "max_tokens": 400, "stop": ["b", "aaaa"], "seed": 1}
    if is_streamed:
        chunks = events(http, "/v1/completions", body | {"stream_options": {"include_usage": True}})
        texts = "".join(entry["text"] for chunk in chunks for entry in chunk["choices"])
        reason, usage = chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]
    else:
        answer = ask(http, "/v1/completions", body)
        texts, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        usage = answer["usage"]
    assert (texts, reason, usage["completion_tokens"]) == ("", "stop", 4)
    eventually(lambda: not backend.engine.has_work)


def test_stop_strings_wait_for_min_tokens(http: httpx.Client) -> None:
    body = ONLY_A | {"prompt": "x", "max_tokens": 20, "stop": "aa", "min_tokens": 6}
    assert ask(http, "/v1/completions", body)["choices"][0]["text"] == "aaaaa"


def test_several_prompts_of_either_kind(http: httpx.Client) -> None:
    texts = ask(http, "/v1/completions", {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 4, "seed": 1, "echo": True})
    ids = ask(http, "/v1/completions", {"prompt": [ids_of("ab"), ids_of("cd")], "n": 2, "max_tokens": 4, "seed": 1})
    assert [choice["index"] for choice in texts["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][:2] for choice in texts["choices"]] == ["ab", "ab", "cd", "cd"]
    assert [choice["text"][2:] for choice in texts["choices"]] == [choice["text"] for choice in ids["choices"]]
    assert texts["usage"]["prompt_tokens"] == 4


def test_echo_scores_the_prompt(http: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    choice = ask(http, "/v1/completions", body)["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "abc" and logprobs["tokens"] == ["a", "b", "c"] and logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"][0] is None and all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert len(logprobs["top_logprobs"]) == 3


def test_chat_logprobs_have_text_and_bytes(http: httpx.Client) -> None:
    body = CHAT | ONLY_A | {"logprobs": True, "top_logprobs": 2}
    choice = ask(http, "/v1/chat/completions", body)["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a"] * 8 and content[0]["bytes"] == [97]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in content)
    chunks = events(http, "/v1/chat/completions", body)
    streamed = [entry["logprobs"] for chunk in chunks for entry in chunk["choices"] if entry["logprobs"]]
    assert [item for logprobs in streamed for item in logprobs["content"]] == content


def test_chat_takes_the_rest_of_the_context(http: httpx.Client) -> None:
    body = {"messages": CHAT["messages"], "temperature": 0, "ignore_eos": True} | ONLY_A
    usage = ask(http, "/v1/chat/completions", body)["usage"]
    assert usage["total_tokens"] == 512


def test_no_token_is_added_to_a_rendered_chat(http: httpx.Client) -> None:
    """P22: the template's special tokens are all there are."""
    reply = ask(http, "/tokenize", {"messages": CHAT["messages"]})
    text = ask(http, "/detokenize", {"tokens": reply["tokens"]})["prompt"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" and reply["count"] == len(reply["tokens"])


def test_anthropic_events_are_the_whole_message(http: httpx.Client) -> None:
    body = {"model": "tiny", "max_tokens": 8, "seed": 1, "messages": CHAT["messages"]}
    whole = ask(http, "/v1/messages", body)
    streamed = events(http, "/v1/messages", body)
    kinds = [event["type"] for event in streamed]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in streamed if event["type"] == "content_block_delta")
    assert whole["content"] == [{"type": "text", "text": text}]
    end = streamed[-2]
    assert end["delta"]["stop_reason"] == whole["stop_reason"] and end["unison"] == whole["unison"]
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    counted = ask(http, "/v1/messages/count_tokens", {"model": "tiny", "messages": CHAT["messages"]})
    used = end["usage"]
    assert counted["input_tokens"] == used["input_tokens"] + used["cache_read_input_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": "x", "nope": 1}, 400, "nope"),
        ("/v1/completions", {"prompt": [999]}, 400, "prompt"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"prompt": [5] * 600}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "temperature": 0.001}, 400, "temperature"),
        ("/v1/completions", {"prompt": "x", "best_of": 2}, 400, "best_of"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "min_tokens": 17}, 400, "min_tokens"),
        ("/v1/completions", {"prompt": "x", "allowed_token_ids": [5], "logit_bias": {"5": -100}}, 200, None),
        ("/v1/completions", {"prompt": "x", "echo": True, "stream": True, "logprobs": 1}, 400, "echo"),
        ("/v1/completions", {"prompt": "x", "model": "gpt"}, 404, "model"),
        ("/v1/completions", {"prompt": "x", "unison": {"pin_version": 77}}, 404, None),
        ("/v1/completions", {"prompt": ["x"] * 300}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "n": 5000}, 400, "n"),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, 400, "top_logprobs"),
        ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, 400, "tool_choice"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0.content"),
        ("/tokenize", {}, 400, "prompt"),
        ("/detokenize", {"tokens": [999]}, 400, "tokens"),
        ("/nowhere", {}, 404, None),
    ],
)
def test_refusals_in_openais_words(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    """R2, P4: bad input is refused with its status and the field's name, before the engine allocates anything."""
    reply = http.post(path, json=body)
    assert reply.status_code == status, reply.text
    if status != 200:
        error = reply.json()["error"]
        assert (error["param"], error["type"]) == (param, TYPES_BY_STATUS[status][0])
        assert error["message"] and error["code"]


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"max_tokens": 1}, 400, "invalid_request_error"),
        ({"model": "claude", "max_tokens": 1, "messages": CHAT["messages"]}, 404, "not_found_error"),
        ({"model": "tiny", "max_tokens": 1, "messages": IMAGE}, 400, "invalid_request_error"),
    ],
)  # fmt: skip
def test_refusals_in_anthropics_words(http: httpx.Client, body: dict[str, Any], status: int, kind: str) -> None:
    reply = http.post("/v1/messages", json=body)
    assert reply.status_code == status
    assert reply.json()["type"] == "error" and reply.json()["error"]["type"] == kind


@pytest.mark.parametrize(
    "raw",
    [b"{", b"[1]", b'"x"', b"\xff", b'{"prompt": "\\ud800"}', b'{"prompt": "x", "temperature": NaN}', b"[" * 20000,
     b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "x", "temperature": 1e999}', b""],
)  # fmt: skip
def test_bodies_that_are_no_request(http: httpx.Client, raw: bytes) -> None:
    reply = http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"


def test_wrong_method(http: httpx.Client) -> None:
    reply = http.get("/v1/completions")
    assert reply.status_code == 405 and reply.headers["allow"] and reply.json()["error"]["code"] == "unknown_method"


def test_keys(serve: Serve) -> None:
    with serve(api_keys=("one", "two"), admin_key="root") as http:
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers={"x-api-key": "on"}).status_code == 401
        assert http.post("/v1/messages", json={}).json()["error"]["type"] == "authentication_error"
        assert http.get("/v1/models", headers={"x-api-key": "two"}).status_code == 200
        assert http.get("/v1/models", headers={"authorization": "bearer one"}).status_code == 200
        assert http.get("/health").status_code == 200
        pause = "/v1/policy/pause"
        assert http.post(pause).status_code == 401
        assert http.post(pause, headers={"x-api-key": "one"}).status_code == 403
        assert http.post("/v1/policy/resume", headers={"x-api-key": "root"}).json()["is_paused"] is False


def test_policy(serve: Serve, backend: EngineBackend) -> None:
    """GET shows versions with digests; changes need the admin key."""
    with serve() as http:
        assert http.post("/v1/policy/rollback", json={"version": 0}).json()["error"]["code"] == "admin_disabled"
    with serve(admin_key="root") as http:
        http.headers["authorization"] = "Bearer root"
        shown = http.get("/v1/policy").json()
        live = backend.engine.live_version
        assert shown["live"] == {"version": live.ordinal, "digest": live.digest} and not shown["is_paused"]
        assert http.post("/v1/policy/rollback", json={"version": 9}).status_code == 404
        assert http.post("/v1/policy/rollback", json={"version": 0}).json()["live"]["version"] == 0
        before = shown["installed"][0]["num_pins"]
        assert http.post("/v1/policy/pin", json={"version": 0}).json()["installed"][0]["num_pins"] == before + 1
        assert http.post("/v1/policy/unpin", json={"version": 0}).json()["installed"][0]["num_pins"] == before
        refused = http.post("/v1/policy/unpin", json={"version": 77})
        assert refused.status_code in (400, 404) and "ordinal:" not in refused.text
        assert http.post("/v1/policy/pause").json()["is_paused"] is True
        assert http.get("/ready").status_code == 503 and http.get("/health").json()["status"] == "paused"
        assert http.post("/v1/policy/resume").json()["is_paused"] is False
        assert http.get("/ready").status_code == 200


def test_body_limit(serve: Serve) -> None:
    with serve(max_body_bytes=200) as http:
        assert http.post("/tokenize", json={"prompt": "x" * 300}).status_code == 413
        chunked = http.post("/tokenize", content=iter([b'{"prompt": "' + b"x" * 300, b'"}']))
        assert chunked.status_code == 413 and chunked.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_frees_its_slot(serve: Serve, backend: EngineBackend, is_streamed: bool) -> None:
    """P42: leaving cancels at the engine, before the first token (paused) and behind it; the next request is served."""
    body = {"prompt": "x", "max_tokens": 10_000, "ignore_eos": True, "stream": is_streamed} | ONLY_A
    with serve(max_concurrent=1, admin_key="root") as http:
        for is_paused in (True, False):
            if is_paused:
                assert http.post("/v1/policy/pause", headers={"x-api-key": "root"}).status_code == 200
            with pytest.raises(httpx.ReadTimeout):
                if is_streamed and not is_paused:
                    with http.stream("POST", "/v1/completions", json=body) as reply:
                        next(reply.iter_bytes())
                        raise httpx.ReadTimeout("left")
                http.post("/v1/completions", json=body, timeout=0.1)
            eventually(lambda: backend.num_in_flight == 0)
            http.post("/v1/policy/resume", headers={"x-api-key": "root"})
            eventually(lambda: not backend.engine.has_work)
        eventually(lambda: http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200)


def test_too_many_requests(serve: Serve, backend: EngineBackend) -> None:
    """One more than allowed is refused at once, and served when there is room again."""
    with serve(max_concurrent=1, retry_after_s=7, admin_key="root") as http, ThreadPoolExecutor(1) as pool:
        http.post("/v1/policy/pause", headers={"x-api-key": "root"})
        first = pool.submit(http.post, "/v1/completions", json={"prompt": "x"})
        eventually(lambda: backend.num_in_flight == 1)
        refused = http.post("/v1/completions", json={"prompt": "x"})
        http.post("/v1/policy/resume", headers={"x-api-key": "root"})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "7"
        assert first.result(timeout=60).status_code == 200
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_time_out(serve: Serve, backend: EngineBackend) -> None:
    """P2: a request that takes too long ends with 408, and nothing is left of it."""
    with serve(request_timeout_s=0.2, admin_key="root") as http:
        http.post("/v1/policy/pause", headers={"x-api-key": "root"})
        reply = http.post("/v1/completions", json={"prompt": "x"})
        http.post("/v1/policy/resume", headers={"x-api-key": "root"})
        assert reply.status_code == 408 and reply.json()["error"]["type"] == "timeout_error"
        eventually(lambda: backend.num_in_flight == 0)


def test_engine_gone(serve: Serve, backend: EngineBackend) -> None:
    with serve() as http:
        backend.is_connected = False
        try:
            reply = http.post("/v1/messages", json={"model": "tiny", "max_tokens": 1, "messages": CHAT["messages"]})
            assert reply.status_code == 503 and reply.headers["retry-after"]
            assert reply.json()["error"]["type"] == "overloaded_error"
            assert http.get("/health").status_code == http.get("/ready").status_code == 503
            assert "unison_up 0.0" in http.get("/metrics").text
        finally:
            backend.is_connected = True


def test_health_asks_the_engine(serve: Serve, backend: EngineBackend) -> None:
    """P35: a web process that answers isn't health; an idle engine is probed, one that hangs is bad."""
    with serve(progress_age_s=1e-6, status_deadline_s=5.0) as http:
        assert http.get("/health").json()["is_probed"] is True
        backend.answers_status = False
        try:
            reply = http.get("/health")
            assert reply.status_code == 503 and reply.json()["status"] == "stalled"
        finally:
            backend.answers_status = True
    with serve() as http:
        http.post("/v1/completions", json={"prompt": "x"})
        assert http.get("/health").json()["is_probed"] is False


def test_metrics(http: httpx.Client) -> None:
    ask(http, "/v1/completions", {"prompt": "abc", "max_tokens": 2, "ignore_eos": True})
    http.post("/v1/completions", json={})
    text = http.get("/metrics").text
    assert 'unison_http_requests_total{path="/v1/completions",status="200"}' in text
    assert 'unison_http_requests_total{path="/v1/completions",status="400"}' in text
    assert "unison_up 1.0" in text and "unison_engine_steps_total" in text and "unison_live_version 0.0" in text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_parameters_that_leave_no_token(http: httpx.Client, is_streamed: bool) -> None:
    """Found out only while drawing, and still the caller's error: 400, also where a stream was asked for."""
    body = {"prompt": "x", "allowed_token_ids": [2, 3], "min_tokens": 2, "stream": is_streamed}
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "empty_support"


def test_what_goes_live_meanwhile_is_in_the_answer(http: httpx.Client, backend: EngineBackend) -> None:
    """V3: a request that carries on under new weights names both versions; one that aborts says so."""
    weights = tiny_weights(backend.engine.spec, seed=1)
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True, "unison": {"on_update": "carry"}}
    with http.stream("POST", "/v1/completions", json=body | ONLY_A) as reply:
        lines = reply.iter_lines()
        next(lines)
        version = backend.engine.install(weights)
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    spans = rest[-1]["choices"][0]["unison"]["versions"]
    assert [span[0] for span in spans] in ([0, version.ordinal], [0]) and spans[-1][2] == 300
    reply = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert reply.headers["x-unison-version"] == str(version.ordinal)
    assert reply.headers["x-unison-digest"] == version.digest
    backend.engine.rollback(0)
    eventually(lambda: http.post("/v1/completions", json={"prompt": "x"}).headers["x-unison-version"] == "0")


def test_models(http: httpx.Client) -> None:
    assert [entry["id"] for entry in http.get("/v1/models").json()["data"]] == ["tiny"]
    assert http.get("/v1/models/tiny").json()["id"] == "tiny" and http.get("/v1/models/a/b").status_code == 404


def test_special_tokens_are_no_text_unless_wanted(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 3, "allowed_token_ids": [4], "ignore_eos": True}
    assert ask(http, "/v1/completions", body)["choices"][0]["text"] == ""
    shown = ask(http, "/v1/completions", body | {"skip_special_tokens": False})["choices"][0]["text"]
    assert shown == "<|im_start|>" * 3


def test_a_stop_token_has_no_text(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 3, "stop_token_ids": ids_of("a"), "unison": True} | ONLY_A
    choice = ask(http, "/v1/completions", body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["unison"]["token_ids"] == [BYTES_FROM + 97]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=6,
)
GOOD = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/messages": {"model": "tiny", "max_tokens": 2, "messages": CHAT["messages"]},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": CHAT["messages"]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [7]},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", GOOD)
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bad_input_is_never_our_fault(http: httpx.Client, path: str, data: st.DataObject) -> None:
    """R2: whatever a field holds, the answer is a result or a refusal that /openapi.json announces."""
    endpoint = next(endpoint for endpoint in ENDPOINTS if endpoint.path == path)
    names = [field.name for field in endpoint.fields or () if field.name != "stream"]
    body = GOOD[path] | data.draw(st.dictionaries(st.sampled_from(names), JSON, min_size=1, max_size=3))
    reply = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400, 404), (body, reply.text)


def test_every_endpoint_is_described(http: httpx.Client) -> None:
    """The description has every method of every path, with the tables that check it."""
    paths = http.get("/openapi.json").json()["paths"]
    assert {endpoint.path for endpoint in ENDPOINTS} == set(ANSWERS)
    assert sum(len(operations) for operations in paths.values()) == len(ENDPOINTS)


def test_every_error_of_ours_has_words() -> None:
    """Each status of the error table is one that the replies know."""
    rows: dict[type[UnisonError], ErrorCode] = ERROR_CODES
    assert {row.http_status for row in rows.values()} <= set(TYPES_BY_STATUS)
