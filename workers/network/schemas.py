"""JSON schemas of the answers, for /openapi.json.

Owns: what is promised about each answer; tests hold real answers against them. Knows no handler. Called by openapi.py.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}


def fields(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with these fields, and maybe others."""
    return {"type": "object", "properties": required | (optional or {}), "required": list(required)}


def array(items: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    """The same, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


OPENAI_ERROR = fields(
    {"error": fields({"message": STRING, "type": STRING, "param": nullable(STRING), "code": nullable(STRING)})}
)
ANTHROPIC_ERROR = fields({"type": {"const": "error"}, "error": fields({"type": STRING, "message": STRING})})
PROBE_FAILED = fields({"status": STRING, "reason": STRING})

UNISON = fields(
    {"versions": array({"type": "array", "items": INTEGER, "minItems": 3, "maxItems": 3}), "seed": INTEGER},
    {"token_ids": array(INTEGER), "logprobs": array(NUMBER), "raw_logprobs": array(NUMBER)},
)
USAGE = fields(
    {
        "prompt_tokens": INTEGER,
        "completion_tokens": INTEGER,
        "total_tokens": INTEGER,
        "prompt_tokens_details": nullable(fields({"cached_tokens": INTEGER})),
    }
)
FINISH = {"enum": ["stop", "length", "tool_calls", "abort"]}
HEAD = {"id": STRING, "object": STRING, "created": INTEGER, "model": STRING}
TOOL_CALL = fields(
    {"id": STRING, "type": {"const": "function"}, "function": fields({"name": STRING, "arguments": STRING})}
)
CHAT_MESSAGE = fields(
    {"role": {"const": "assistant"}, "content": nullable(STRING)}, {"tool_calls": array(TOOL_CALL)}
)
CHAT = fields(
    HEAD
    | {
        "choices": array(
            fields(
                {
                    "index": INTEGER,
                    "message": CHAT_MESSAGE,
                    "logprobs": nullable(OBJECT),
                    "finish_reason": FINISH,
                    "unison": UNISON,
                }
            )
        ),
        "usage": USAGE,
    }
)
TEXT = fields(
    HEAD
    | {
        "choices": array(
            fields(
                {
                    "index": INTEGER,
                    "text": STRING,
                    "logprobs": nullable(OBJECT),
                    "finish_reason": FINISH,
                    "unison": UNISON,
                }
            )
        ),
        "usage": USAGE,
    }
)
MESSAGE = fields(
    {
        "id": STRING,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": STRING,
        "content": array(fields({"type": {"enum": ["text", "tool_use"]}})),
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "abort"]},
        "stop_sequence": nullable(STRING),
        "usage": fields({"input_tokens": INTEGER, "output_tokens": INTEGER, "cache_read_input_tokens": INTEGER}),
        "unison": UNISON,
    }
)
MODEL = fields({"id": STRING, "object": {"const": "model"}, "created": INTEGER, "owned_by": STRING})
MODELS = fields({"object": {"const": "list"}, "data": array(MODEL)})
TOKENIZED = fields({"tokens": array(INTEGER), "count": INTEGER, "max_model_len": INTEGER})
DETOKENIZED = fields({"prompt": STRING})
COUNTED = fields({"input_tokens": INTEGER})
VERSION = fields({"version": INTEGER, "digest": STRING})
POLICY = fields(
    {
        "live": VERSION,
        "installed": array(
            fields({"version": INTEGER, "digest": STRING, "state": STRING, "num_pins": INTEGER})
        ),
        "is_paused": BOOLEAN,
    }
)
ROLLED_BACK = fields({"live": VERSION})
HEALTHY = fields({"status": STRING, "step": INTEGER, "step_age_s": NUMBER, "loop_age_s": NUMBER})
READY = fields({"status": STRING, "model": STRING, "live": VERSION})
