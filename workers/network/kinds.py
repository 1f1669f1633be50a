"""Kinds of JSON values: how each is checked, and the JSON schema that says the same.

Owns: `Kind`, `Field` and what combines them. Because one object makes both the check and the schema, the two can't
drift apart. Knows no endpoint; fields.py builds the tables. A value that doesn't fit raises InvalidRequestError with
the dotted name of the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...ipc.errors import InvalidRequestError


@dataclass(frozen=True)
class Kind:
    """One kind of value."""

    words: str
    """What it is, for error texts: `an integer in [0, 20]`."""
    schema: Mapping[str, Any]
    """JSON schema (2020-12)."""
    parse: Callable[[str, Any], Any]
    """(dotted name, JSON value) → checked value."""


@dataclass(frozen=True)
class Field:
    """One field of a request object."""

    name: str
    """Its key."""
    kind: Kind
    """What its value may be; null counts as absent."""
    text: str
    """What it does, for the schema."""
    is_required: bool = False
    """True where the object is refused without it."""


def refuse(name: str, value: object, words: str) -> InvalidRequestError:
    """The error for a value of the wrong kind."""
    shown = repr(value)
    return InvalidRequestError(name, f"is {shown if len(shown) <= 80 else shown[:77] + '...'}; must be {words}")


def integer(low: int, high: int) -> Kind:
    """A whole number in [low, high]; JSON doesn't tell 1 from 1.0, so neither does this."""
    words = f"an integer in [{low}, {high}]"

    def parse(name: str, value: Any) -> int:
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_whole or not low <= value <= high:
            raise refuse(name, value, words)
        return int(value)

    return Kind(words, {"type": "integer", "minimum": low, "maximum": high}, parse)


def number(low: float, high: float) -> Kind:
    """A number in [low, high]."""
    words = f"a number in [{low:g}, {high:g}]"

    def parse(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise refuse(name, value, words)
        return float(value)

    return Kind(words, {"type": "number", "minimum": low, "maximum": high}, parse)


def boolean() -> Kind:
    """True or false."""

    def parse(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise refuse(name, value, "true or false")
        return value

    return Kind("true or false", {"type": "boolean"}, parse)


def text(min_length: int = 0) -> Kind:
    """A string of at least `min_length` characters."""
    words = f"a string of at least {min_length} characters" if min_length else "a string"

    def parse(name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) < min_length:
            raise refuse(name, value, words)
        return value

    return Kind(words, {"type": "string", **({"minLength": min_length} if min_length else {})}, parse)


def choice(*values: Any) -> Kind:
    """One of a few values."""
    words = "one of " + ", ".join(map(repr, values)) if len(values) > 1 else repr(values[0])

    def parse(name: str, value: Any) -> Any:
        for known in values:
            if value == known and isinstance(value, bool) == isinstance(known, bool):
                return known
        raise refuse(name, value, words)

    return Kind(words, {"enum": list(values)}, parse)


def array(item: Kind, low: int, high: int | None = None, is_unique: bool = False) -> Kind:
    """A list of `low` to `high` values of one kind, as a tuple."""
    size = f"{low} or more" if high is None else f"{low} to {high}"
    words = f"a list of {size}{' different' if is_unique else ''} values, each {item.words}"
    bounds = {"minItems": low} | ({} if high is None else {"maxItems": high})
    schema = {"type": "array", "items": item.schema, **bounds} | ({"uniqueItems": True} if is_unique else {})

    def parse(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) < low or (high is not None and len(value) > high):
            raise refuse(name, value, words)
        parsed = tuple(item.parse(f"{name}.{index}", entry) for index, entry in enumerate(value))
        if is_unique and len(set(parsed)) != len(parsed):
            raise refuse(name, value, words)
        return parsed

    return Kind(words, schema, parse)


def either(*kinds: Kind) -> Kind:
    """A value of the first kind that takes it. The error of the last kind is told if its outer type fits."""
    words = ", or ".join(kind.words for kind in kinds)

    def parse(name: str, value: Any) -> Any:
        deepest: InvalidRequestError | None = None
        for kind in kinds:
            try:
                return kind.parse(name, value)
            except InvalidRequestError as error:
                if len(error.field) > len(name):
                    deepest = error
        raise deepest or refuse(name, value, words)

    return Kind(words, {"anyOf": [dict(kind.schema) for kind in kinds]}, parse)


def tagged(key: str, kind_by_tag: Mapping[str, Kind]) -> Kind:
    """An object whose field `key` says which kind it is, so that an error is about that kind."""
    tag_kind = choice(*kind_by_tag)
    words = f"an object whose {key} is {tag_kind.words}"

    def parse(name: str, value: Any) -> Any:
        if not isinstance(value, dict):
            raise refuse(name, value, words)
        tag = tag_kind.parse(f"{name}.{key}", value.get(key))
        return kind_by_tag[tag].parse(name, value)

    return Kind(words, {"anyOf": [dict(kind.schema) for kind in kind_by_tag.values()]}, parse)


def token_biases(max_id: int) -> Kind:
    """An object from token ids (as strings) to values in [-100, 100], as pairs."""
    words = "an object from token ids to numbers in [-100, 100]"
    value_kind = number(-100.0, 100.0)
    schema = {
        "type": "object", "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}, "additionalProperties":
        value_kind.schema, }  # fmt: skip

    def parse(name: str, value: Any) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict):
            raise refuse(name, value, words)
        pairs = []
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit()) or (len(key) > 1 and key[0] == "0") or int(key) > max_id:
                raise refuse(f"{name}.{key}", key, f"a token id in [0, {max_id}]")
            pairs.append((int(key), value_kind.parse(f"{name}.{key}", bias)))
        return tuple(pairs)

    return Kind(words, schema, parse)


def anything() -> Kind:
    """Any JSON value; for fields that are ignored."""
    return Kind("anything", {}, lambda _name, value: value)


def any_object() -> Kind:
    """Any JSON object."""

    def parse(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refuse(name, value, "an object")
        return value

    return Kind("an object", {"type": "object"}, parse)


def record(fields: Sequence[Field]) -> Kind:
    """An object with these fields and no others."""
    return Kind("an object", object_schema(fields), lambda name, value: parse_object(fields, value, name))


def parse_object(fields: Sequence[Field], value: Any, prefix: str = "") -> dict[str, Any]:
    """The fields of an object that are there and not null, each checked.

    Raises:
        InvalidRequestError: it isn't an object, a field is unknown, missing, or of the wrong kind.
    """
    if not isinstance(value, dict):
        raise refuse(prefix or "body", value, "an object")
    known = {field.name: field for field in fields}
    dot = f"{prefix}." if prefix else ""
    for key in value:
        if key not in known:
            raise InvalidRequestError(f"{dot}{key}", f"is not known here; known are {', '.join(sorted(known))}")
    parsed = {}
    for field in fields:
        if value.get(field.name) is not None:
            parsed[field.name] = field.kind.parse(f"{dot}{field.name}", value[field.name])
        elif field.is_required:
            raise InvalidRequestError(f"{dot}{field.name}", f"is missing; must be {field.kind.words}")
    return parsed


def object_schema(fields: Sequence[Field]) -> dict[str, Any]:
    """JSON schema of an object with these fields and no others."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {field.name: _property(field) for field in fields},
        "additionalProperties": False,
    }
    required = [field.name for field in fields if field.is_required]
    return schema | ({"required": required} if required else {})


def _property(field: Field) -> dict[str, Any]:
    if field.is_required or not field.kind.schema:
        return {**field.kind.schema, "description": field.text}
    return {"anyOf": [dict(field.kind.schema), {"type": "null"}], "description": field.text}
