"""Kinds: the check and the schema say the same; unknown fields are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unison.ipc.errors import InvalidRequestError
from unison.workers.network import fields
from unison.workers.network.kinds import object_schema, parse_object

TABLES = {
    "chat": (fields.CHAT, {"messages": [{"role": "user", "content": "x"}]}),
    "completions": (fields.COMPLETIONS, {"prompt": "x"}),
    "messages": (fields.MESSAGES, {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"tempertature": 1}, "tempertature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"stop_token_ids": [1, 1]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"unison": {"on_update": "perhaps"}}, "unison.on_update"),
        ({"unison": {"pin": 3}}, "unison.pin"),
    ],
)
def test_refused_by_name(name: str, extra: dict[str, Any], field: str) -> None:
    """P4, P50: an unknown field, or a value out of its bounds, is refused with the field's name."""
    table, good = TABLES[name]
    with pytest.raises(InvalidRequestError) as caught:
        parse_object(table, good | extra)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages.0.colour"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools.0.function.strict"),
    ],
)
def test_chat_refusals(extra: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_object(fields.CHAT, TABLES["chat"][1] | extra)
    assert caught.value.field.startswith(field)


def test_null_is_absent_and_whole_floats_are_integers() -> None:
    parsed = parse_object(fields.COMPLETIONS, {"prompt": "x", "seed": None, "max_tokens": 3.0, "user": {"any": 1}})
    assert parsed == {"prompt": "x", "max_tokens": 3, "user": {"any": 1}}


def test_providers_own_fields_without_meaning_are_ignored() -> None:
    parse_object(fields.CHAT, TABLES["chat"][1] | {"user": "u", "store": True, "metadata": {"a": "b"}})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(TABLES)), st.data())
def test_any_json_is_parsed_or_refused(name: str, data: st.DataObject) -> None:
    """Nothing but InvalidRequestError comes out, whatever goes in."""
    table, good = TABLES[name]
    value = good | data.draw(st.dictionaries(st.sampled_from([field.name for field in table]), JSON, max_size=3))
    try:
        parse_object(table, value)
    except InvalidRequestError as error:
        assert error.field


def test_schema_says_what_the_check_does() -> None:
    schema = object_schema(fields.CHAT)
    assert schema["required"] == ["messages"] and schema["additionalProperties"] is False
    assert set(schema["properties"]) == {field.name for field in fields.CHAT}
