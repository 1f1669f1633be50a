"""The providers' own SDKs against bin/serve's processes, over the real model: what a user's program sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from harness.serving import serving

if TYPE_CHECKING:  # both take seconds to import, also where only the other tests are wanted
    import anthropic
    import openai

pytestmark = [pytest.mark.slow]

MODEL = "smollm2-135m"
COLD = {"temperature": 0}
QUESTION: list[Any] = [{"role": "user", "content": "Name the capital of France."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Name of the city"}},
    "required": ["city"],
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": PARAMETERS},
}
ASK_WEATHER: list[Any] = [{"role": "user", "content": "What's the weather in Paris?"}]


@pytest.fixture(scope="module")
def base_url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the real model is served in float32: server, worker and supervisor, as a user starts them."""
    options = ("--served-name", MODEL, "--dtype", "float32", "--port", "0", "--set", "engine.cache.num_tokens=16384")
    with serving(tmp_path_factory.mktemp("serve") / "r", model_dir, *options) as run:
        yield run.url


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def claude(base_url: str) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [MODEL] == [model.id for model in claude.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def test_greedy_text_is_that_of_transformers(client: openai.OpenAI, model_dir: Path) -> None:
    """S35: text over HTTP equals transformers' generate for the same conversation, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        generated = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    expected = tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=24)
    assert answer.choices[0].message.content == expected
    assert answer.usage is not None and answer.usage.prompt_tokens == inputs["input_ids"].shape[1]


def test_chat_stream(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**options)
    text, last = "", None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        last = chunk
    assert text == whole.choices[0].message.content
    assert last is not None and last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_the_stream_helper_of_the_sdk(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, temperature=0, max_tokens=12) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content and final.choices[0].finish_reason in ("stop", "length")


def test_logprobs_and_seed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL, "messages": QUESTION, "seed": 7, "n": 2, "max_tokens": 10, "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    first, second = (client.chat.completions.create(**options) for _ in range(2))
    for one, other in zip(first.choices, second.choices, strict=True):
        assert one.message.content == other.message.content and one.logprobs is not None
        assert one.logprobs.content is not None
        assert "".join(entry.token for entry in one.logprobs.content) == one.message.content
        assert all(len(entry.top_logprobs) == 3 for entry in one.logprobs.content)
    assert first.choices[0].message.content != first.choices[1].message.content


def test_versions_reach_strict_sdks_without_harm(client: openai.OpenAI) -> None:
    """P44: what this server adds is in one object of its own, and in headers."""
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, max_tokens=4, extra_body={"unison": {"detail": True, "on_update": "carry"}}
    )
    answer = raw.parse()
    extra = answer.choices[0].model_extra
    assert extra is not None and extra["unison"]["versions"] == [[0, 0, len(extra["unison"]["token_ids"])]]
    assert not getattr(answer, "metadata", None) and len(raw.headers["x-unison-digest"]) == 32
    assert raw.headers["x-unison-version"] == "0"


def test_text_completions(client: openai.OpenAI) -> None:
    prompts = ["One, two,", "A, B,"]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=4, temperature=0, echo=True)
    assert [choice.text[:8] for choice in answer.choices] == ["One, two", "A, B, C,"]
    streamed = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=4, temperature=0, stream=True)
    assert "One, two," + "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text


def test_stop_strings(client: openai.OpenAI) -> None:
    prompt = "One, two, three,"
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=30, temperature=0, stop=["ve,"])
    assert answer.choices[0].text == " four, fi" and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called(client: openai.OpenAI, choice: Any) -> None:
    """Arguments are JSON, and the result goes back into the conversation."""
    options: dict[str, Any] = {
        "model": MODEL, "tools": [WEATHER], "tool_choice": choice, "temperature": 0, "max_tokens": 60,
    }  # fmt: skip
    answer = client.chat.completions.create(messages=ASK_WEATHER, **options)
    calls = answer.choices[0].message.tool_calls
    assert calls and calls[0].type == "function" and calls[0].function.name == "get_weather"
    assert answer.choices[0].finish_reason == "tool_calls"
    assert isinstance(json.loads(calls[0].function.arguments), dict)
    fragments = [
        entry.function.arguments or ""
        for chunk in client.chat.completions.create(messages=ASK_WEATHER, stream=True, **options)
        for entry in chunk.choices[0].delta.tool_calls or []
        if entry.function is not None
    ]
    assert "".join(fragments) == calls[0].function.arguments
    history: list[Any] = [
        *ASK_WEATHER,
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": calls[0].id, "content": "18 degrees, sunny"},
    ]
    after = client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER], max_tokens=16, temperature=0)
    assert after.choices[0].message.content


def test_errors_are_the_sdks_own(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    import anthropic
    import openai

    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, extra_body={"nope": 1})
    assert bad.value.param == "nope" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 9000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=1, messages=QUESTION)
    with pytest.raises(anthropic.BadRequestError):
        image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
        claude.messages.create(model=MODEL, max_tokens=1, messages=image)


def test_anthropic_message_and_stream(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "extra_body": COLD}
    whole = claude.messages.create(**options)
    assert whole.content[0].type == "text"
    with claude.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    same = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
    assert same.choices[0].message.content == text
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_anthropic_stop_sequence_and_prefill(claude: anthropic.Anthropic) -> None:
    begun: list[Any] = [*QUESTION, {"role": "assistant", "content": "One, two, three,"}]
    answer = claude.messages.create(model=MODEL, messages=begun, max_tokens=30, extra_body=COLD, stop_sequences=["ve,"])
    assert answer.stop_reason in ("stop_sequence", "end_turn", "max_tokens")
    assert (answer.stop_sequence == "ve,") == (answer.stop_reason == "stop_sequence")


def test_anthropic_tool_use(claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "get_weather", "description": "Weather of a city", "input_schema": PARAMETERS}
    options: dict[str, Any] = {
        "model": MODEL, "max_tokens": 60, "extra_body": COLD, "tools": [tool], "tool_choice": {"type": "any"},
    }  # fmt: skip
    answer = claude.messages.create(messages=ASK_WEATHER, **options)
    used = [block for block in answer.content if block.type == "tool_use"]
    assert used and used[0].name == "get_weather" and isinstance(used[0].input, dict)
    assert answer.stop_reason == "tool_use"
    with claude.messages.stream(messages=ASK_WEATHER, **options) as stream:
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [used[0].input]
    history: list[Any] = [
        *ASK_WEATHER,
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used[0].id, "content": "18 degrees"}]},
    ]
    assert claude.messages.create(model=MODEL, messages=history, tools=[tool], max_tokens=8, extra_body=COLD).content


def test_leaving_a_stream_leaves_the_server_well(client: openai.OpenAI, base_url: str) -> None:
    """P42: a stream that is left is cancelled, and the next request is served."""
    endless = {"ignore_eos": True}
    stream = client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, extra_body=endless)
    next(iter(stream))
    stream.close()
    assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices
    assert httpx.get(f"{base_url}/health").status_code == 200
