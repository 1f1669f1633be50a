"""Request fields of every endpoint, as tables: what is checked and what /openapi.json says are made of them.

Owns: the tables. A field that a provider knows and that would change nothing here is ignored; one that would change the
result and can't be served takes only the value that changes nothing; any other is unknown, and refused by name. Knows
no engine. Called by the handlers and by openapi.py.
"""

from __future__ import annotations

from ...ipc.types import MAX_COMPLETIONS, MAX_SEED, MAX_TOKEN_ID, MAX_TOP_LOGPROBS, OnUpdate
from .kinds import (
    Field,
    any_object,
    anything,
    array,
    boolean,
    choice,
    either,
    integer,
    number,
    record,
    tagged,
    text,
    token_biases,
)  # fmt: skip

MAX_COUNT = 2**31 - 1
MAX_STOPS = 16
TOOL_NAME_CHARS = 64

TOKEN_IDS = array(integer(0, MAX_TOKEN_ID), 1)
STOP_STRINGS = array(text(1), 0, MAX_STOPS)


def ignored(*names: str) -> tuple[Field, ...]:
    """Fields that a provider knows and that mean nothing here."""
    return tuple(Field(name, anything(), "Ignored: it changes nothing here.") for name in names)


def only(name: str, value: object, text: str) -> Field:
    """A field that can be served with one value alone."""
    return Field(name, choice(value), text)


UNISON = Field(
    "unison",
    either(
        boolean(),
        record(
            (
                Field("on_update", choice(*(rule.value for rule in OnUpdate)), "What happens when the policy changes."),
                Field("pin_version", integer(0, MAX_SEED), "Policy version to run on from start to end."),
                Field("detail", boolean(), "Also give token ids and log-probs of every token."),
            )
        ),
    ),
    "Options of this server; true is short for {detail: true}.",
)

SAMPLING = (
    Field("temperature", number(0.0, 100.0), "Logits are divided by it; 0 is greedy. Default 1."),
    Field("top_p", number(1e-9, 1.0), "Keep the most probable tokens up to this mass. Default 1."),
    Field("top_k", integer(-1, MAX_TOKEN_ID), "Keep the k most probable tokens; 0 and -1 keep all."),
    Field("min_p", number(0.0, 1.0), "Keep tokens at least so probable, relative to the most probable one."),
    Field("repetition_penalty", number(0.01, 10.0), "Above 1, tokens seen before become less probable."),
    Field("stop_token_ids", array(integer(0, MAX_TOKEN_ID), 0, is_unique=True), "Tokens that end the completion."),
    Field("allowed_token_ids", array(integer(0, MAX_TOKEN_ID), 1, is_unique=True), "Draw only these."),
    Field("min_tokens", integer(0, MAX_COUNT), "No stop before so many tokens."),
    Field("ignore_eos", boolean(), "Go on behind the model's own end."),
    Field("skip_special_tokens", boolean(), "Leave special tokens out of the text. Default true."),
    Field("seed", integer(0, MAX_SEED), "Makes the completion repeatable; told in the answer when absent."),
    UNISON,
)

OPENAI_SAMPLING = (
    Field("model", text(1), "Name of the served model, or of none other."),
    Field("n", integer(1, MAX_COMPLETIONS), "Completions per prompt. Default 1."),
    Field("stop", either(text(1), STOP_STRINGS), "The text ends before the first of these."),
    Field("stream", boolean(), "Send server-sent events."),
    Field(
        "stream_options",
        record(
            (
                Field("include_usage", boolean(), "Send usage in a last chunk."),
                *ignored("include_obfuscation"),
            )
        ),
        "Options of the stream.",
    ),
    Field("presence_penalty", number(-2.0, 2.0), "Makes tokens generated before less probable."),
    Field("frequency_penalty", number(-2.0, 2.0), "The same, once per occurrence."),
    Field("logit_bias", token_biases(MAX_TOKEN_ID), "Added to the logits of these tokens."),
    *SAMPLING,
    *ignored("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
             "prompt_cache_options", "prompt_cache_retention"),
)

COMPLETIONS = (
    Field(
        "prompt",
        either(text(), TOKEN_IDS, array(text(), 1), array(TOKEN_IDS, 1)),
        "Text, token ids, or a list of either.",
        is_required=True,
    ),
    Field("max_tokens", integer(0, MAX_COUNT), "Most tokens to generate. Default 16; 0 only with echo."),
    Field("logprobs", integer(0, MAX_TOP_LOGPROBS), "Log-probs of the tokens, with so many alternatives."),
    Field("echo", boolean(), "Put the prompt before the completion."),
    Field("best_of", integer(1, MAX_COMPLETIONS), "Must equal n: nothing is thrown away."),
    only("suffix", "", "Nothing can be inserted before a suffix."),
    *OPENAI_SAMPLING,
)

TOOL = record(
    (
        Field("type", choice("function"), "Kind of tool.", is_required=True),
        Field(
            "function",
            record(
                (
                    Field("name", text(1), "What the model calls it.", is_required=True),
                    Field("description", text(), "What it does."),
                    Field("parameters", any_object(), "JSON schema of its arguments."),
                    only("strict", False, "Arguments are checked to be JSON, not forced into the schema."),
                )
            ),
            "The function.",
            is_required=True,
        ),
    )
)

TEXT_PART = record(
    (
        Field("type", choice("text"), "Kind of part; there are no images.", is_required=True),
        Field("text", text(), "The text.", is_required=True),
    )
)

CONTENT = either(text(), array(TEXT_PART, 1))

CALL = record(
    (
        Field("id", text(1), "Id of the call.", is_required=True),
        Field("type", choice("function"), "Kind of call."),
        Field(
            "function",
            record(
                (
                    Field("name", text(1), "Name of the tool.", is_required=True),
                    Field("arguments", text(), "A JSON object.", is_required=True),
                )
            ),
            "What was called.",
            is_required=True,
        ),
        *ignored("index"),
    )
)

SPEAKER = Field("name", text(), "Name of the speaker, for templates that show it.")
SAID = Field("content", CONTENT, "What is said.", is_required=True)


def role(name: str) -> Field:
    """The role that a kind of message has."""
    return Field("role", choice(name), "Who speaks.", is_required=True)


MESSAGE = tagged(
    "role",
    {name: record((role(name), SAID, SPEAKER)) for name in ("system", "developer", "user")}
    | {
        "assistant": record(
            (
                role("assistant"),
                Field("content", CONTENT, "What is said; with calls it may be nothing."),
                SPEAKER,
                Field("tool_calls", array(CALL, 0), "Calls that the assistant made."),
                *ignored("refusal", "annotations", "audio", "function_call", "unison"),
            )
        ),
        "tool": record(
            (
                role("tool"),
                SAID,
                SPEAKER,
                Field("tool_call_id", text(1), "Which call the tool answers.", is_required=True),
            )
        ),
    },
)

CHAT = (
    Field("messages", array(MESSAGE, 1), "The conversation.", is_required=True),
    Field("max_completion_tokens", integer(1, MAX_COUNT), "Most tokens to generate. Default: rest of the context."),
    Field("max_tokens", integer(1, MAX_COUNT), "Older name of max_completion_tokens."),
    Field("logprobs", boolean(), "Log-probs of the tokens."),
    Field("top_logprobs", integer(0, MAX_TOP_LOGPROBS), "So many alternatives; needs logprobs."),
    Field("tools", array(TOOL, 0), "Tools that the model may call."),
    Field(
        "tool_choice",
        either(
            choice("none", "auto", "required"),
            record(
                (
                    Field("type", choice("function"), "Kind of tool.", is_required=True),
                    Field(
                        "function",
                        record((Field("name", text(1), "Name of the tool.", is_required=True),)),
                        "The tool.",
                        is_required=True,
                    ),
                )
            ),
        ),
        "Whether a tool is called, or which.",
    ),
    Field(
        "response_format",
        record((Field("type", choice("text"), "Text alone.", is_required=True),)),
        "Only text: output isn't forced into a schema.",
    ),
    Field("modalities", array(choice("text"), 0), "Only text."),
    *OPENAI_SAMPLING,
    *ignored("parallel_tool_calls", "reasoning_effort", "verbosity", "prediction"),
)

CACHE_CONTROL = ignored("cache_control")

ANTHROPIC_TEXT = record(
    (
        Field("type", choice("text"), "Kind of block; there are no images.", is_required=True),
        Field("text", text(), "The text.", is_required=True),
        *ignored("cache_control", "citations"),
    )
)

ANTHROPIC_TOOL_USE = record(
    (
        Field("type", choice("tool_use"), "A call.", is_required=True),
        Field("id", text(1), "Id of the call.", is_required=True),
        Field("name", text(1), "Name of the tool.", is_required=True),
        Field("input", any_object(), "Arguments.", is_required=True),
        *ignored("cache_control", "caller", "toolset_name"),
    )
)

ANTHROPIC_TOOL_RESULT = record(
    (
        Field("type", choice("tool_result"), "The answer to a call.", is_required=True),
        Field("tool_use_id", text(1), "Id of the call.", is_required=True),
        Field("content", either(text(), array(ANTHROPIC_TEXT, 0)), "What the tool gave."),
        Field("is_error", boolean(), "True where the tool failed."),
        *CACHE_CONTROL,
    )
)

ANTHROPIC_BLOCK = tagged(
    "type", {"text": ANTHROPIC_TEXT, "tool_use": ANTHROPIC_TOOL_USE, "tool_result": ANTHROPIC_TOOL_RESULT}
)

ANTHROPIC_MESSAGE = record(
    (
        Field("role", choice("user", "assistant"), "Who speaks.", is_required=True),
        Field(
            "content",
            either(text(), array(ANTHROPIC_BLOCK, 1)),
            "What is said.",
            is_required=True,
        ),
    )
)

ANTHROPIC_TOOL = record(
    (
        Field("name", text(1), "What the model calls it.", is_required=True),
        Field("description", text(), "What it does."),
        Field("input_schema", any_object(), "JSON schema of its arguments.", is_required=True),
        Field("type", choice("custom"), "Only the caller's own tools."),
        *CACHE_CONTROL,
    )
)

ANTHROPIC_PROMPT = (
    Field("model", text(1), "Name of the served model.", is_required=True),
    Field("messages", array(ANTHROPIC_MESSAGE, 1), "The conversation.", is_required=True),
    Field("system", either(text(), array(ANTHROPIC_TEXT, 0)), "System prompt."),
    Field("tools", array(ANTHROPIC_TOOL, 0), "Tools that the model may call."),
    Field(
        "tool_choice",
        record(
            (
                Field("type", choice("auto", "any", "tool", "none"), "Whether a tool is called.", is_required=True),
                Field("name", text(1), "Which, with type tool."),
                *ignored("disable_parallel_tool_use"),
            )
        ),
        "Whether a tool is called, or which.",
    ),
    Field(
        "thinking",
        record((Field("type", choice("disabled"), "Only disabled.", is_required=True),)),
        "Thoughts aren't told apart from text.",
    ),
    *CACHE_CONTROL,
)

MESSAGES = (
    *ANTHROPIC_PROMPT,
    Field("max_tokens", integer(1, MAX_COUNT), "Most tokens to generate.", is_required=True),
    Field("stop_sequences", STOP_STRINGS, "The text ends before the first of these."),
    Field("stream", boolean(), "Send server-sent events."),
    *SAMPLING,
    *ignored("metadata", "service_tier", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id"),
)

TOKENIZE = (
    Field("model", text(1), "Name of the served model."),
    Field("prompt", text(), "Text, or else give messages."),
    Field("messages", array(MESSAGE, 1), "A conversation, put through the chat template."),
    Field("tools", array(TOOL, 0), "Tools that go with messages."),
    Field("add_special_tokens", boolean(), "Add what the tokenizer adds to a prompt. Default true; not for messages."),
)

DETOKENIZE = (
    Field("model", text(1), "Name of the served model."),
    Field("tokens", array(integer(0, MAX_TOKEN_ID), 0), "Token ids.", is_required=True),
    Field("skip_special_tokens", boolean(), "Leave special tokens out. Default false."),
)

VERSION = (Field("version", integer(0, MAX_SEED), "Ordinal of an installed policy version.", is_required=True),)

NOTHING: tuple[Field, ...] = ()
