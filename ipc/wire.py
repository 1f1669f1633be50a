"""Codec: frozen dataclasses to bytes and back, strictly; the wire format is derived from the types alone (P4, P43).

A frame is the msgpack array [call id, tag, body]. The tag is the class name; the body is a map with exactly the fields
of the class. Rules by type hint: `tuple[int, ...]` travels as packed little-endian int32, `tuple[float, ...]` as packed
float64, other tuples as arrays, enums as their values, nested dataclasses as maps, unions as [tag, body]. Nothing else
can be sent, and nothing but these types can come out: no pickle, no code, no object hooks.

Owns: packing, unpacking, the bounds on what is accepted, the schema digest. Knows nothing of sockets or of what the
messages mean. Called by the channels. Source: the MessagePack specification.
"""

from __future__ import annotations

import struct
import types
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import xxhash

from .errors import WireError

FORMAT_VERSION = 1
MAX_FRAME_BYTES = 64 << 20
MAX_ITEMS = 4_000_000
"""Longest packed array, in elements."""
MAX_ENTRIES = 100_000
"""Longest array or map of anything else."""
MAX_TEXT_BYTES = 1 << 20
MAX_INT = 2**63 - 1

Pack = Callable[[Any], Any]
Unpack = Callable[[Any, str], Any]


@dataclass(frozen=True)
class Envelope:
    """A frame taken apart as far as its header; the body is still raw."""

    call_id: int
    """Which call of the sender's this is about."""
    tag: str
    """Class name of the message."""
    body: Any
    """Raw body, as msgpack gave it."""


@dataclass(frozen=True)
class _Shape:
    """How one type crosses the wire."""

    pack: Pack
    """Value → what msgpack takes."""
    unpack: Unpack
    """(what msgpack gave, where) → value; raises WireError."""
    text: str
    """Canonical description, part of the schema digest."""


class Codec:
    """Encodes and decodes a closed set of message types. Stateless after construction; any thread may use it."""

    def __init__(self, messages: Iterable[type]) -> None:
        self._shapes: dict[Any, _Shape] = {}
        self._types = {kind.__name__: kind for kind in messages}
        self._bodies = {tag: self._shape(kind) for tag, kind in self._types.items()}
        schema = "\n".join(f"{tag}={self._bodies[tag].text}" for tag in sorted(self._bodies))
        self.schema_digest = xxhash.xxh3_128_hexdigest(f"{FORMAT_VERSION}\n{schema}".encode())
        """xxh3-128 over every message, field and type; two processes talk only if theirs are equal."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Names of all messages, sorted."""
        return tuple(sorted(self._types))

    def encode(self, call_id: int, message: Any) -> bytes:
        """A frame.

        Raises:
            WireError: the message is of no registered type, has a value that its hint doesn't allow, or is too large.
        """
        tag = type(message).__name__
        body = self._bodies.get(tag)
        if body is None or self._types[tag] is not type(message):
            raise WireError(f"{tag} is no registered message")
        try:
            frame: bytes = msgpack.packb([call_id, tag, body.pack(message)])
        except (TypeError, ValueError, OverflowError, AttributeError, struct.error) as error:
            raise WireError(f"{tag} can't be encoded: {error}") from error
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"{tag} takes {len(frame)} bytes; the limit of a frame is {MAX_FRAME_BYTES}; send less")
        return frame

    def open(self, frame: bytes) -> Envelope:
        """Check the frame's outside: size, msgpack, header.

        Raises:
            WireError: it is none of this protocol.
        """
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {len(frame)} bytes came; the limit is {MAX_FRAME_BYTES}")
        try:
            whole = msgpack.unpackb(
                frame, raw=False, strict_map_key=True, max_str_len=MAX_TEXT_BYTES, max_bin_len=MAX_FRAME_BYTES,
                max_array_len=MAX_ENTRIES, max_map_len=MAX_ENTRIES, max_ext_len=0,
            )  # fmt: skip
        except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
            raise WireError(f"a frame of {len(frame)} bytes isn't msgpack within bounds: {error!r:.200}") from error
        if not isinstance(whole, list) or len(whole) != 3:
            raise WireError("a frame isn't an array of call id, tag and body")
        call_id, tag, body = whole
        if type(call_id) is not int or not 0 <= call_id <= MAX_INT:
            raise WireError(f"a frame has the call id {call_id!r:.60}; it is an integer in [0, 2^63)")
        if type(tag) is not str:
            raise WireError("a frame's tag isn't text")
        return Envelope(call_id, tag, body)

    def message(self, envelope: Envelope) -> Any:
        """The message inside; the types' own checks run too.

        Raises:
            WireError: unknown tag, missing or extra field, wrong type, out of bounds. Errors of the type's own checks
            (InvalidRequestError) come through as they are.
        """
        body = self._bodies.get(envelope.tag)
        if body is None:
            raise WireError(f"the tag {envelope.tag!r:.60} is unknown; known are {', '.join(self.tags)}")
        return body.unpack(envelope.body, envelope.tag)

    def decode(self, frame: bytes) -> tuple[int, Any]:
        """(call id, message) in one go."""
        envelope = self.open(frame)
        return envelope.call_id, self.message(envelope)

    # ---- shapes by type hint -----------------------------------------------------------------------------------------

    def _shape(self, hint: Any) -> _Shape:
        if hint not in self._shapes:
            self._shapes[hint] = self._derive(hint)
        return self._shapes[hint]

    def _derive(self, hint: Any) -> _Shape:
        origin, args = get_origin(hint), get_args(hint)
        if hint in _SCALARS:
            return _SCALARS[hint]
        if origin in (Union, types.UnionType):
            return self._optional(args)
        if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
            return _PACKED[args[0]] if args[0] in _PACKED else _sequence(self._shape(args[0]))
        if origin is tuple:
            return _fixed([self._shape(arg) for arg in args])
        if origin is dict and args[0] is str:
            return _mapping(self._shape(args[1]))
        if isinstance(hint, type) and issubclass(hint, Enum):
            return _enumeration(hint)
        if isinstance(hint, type) and is_dataclass(hint):
            return self._record(hint)
        raise TypeError(f"{hint!r} can't cross the wire")

    def _optional(self, args: tuple[Any, ...]) -> _Shape:
        inner = [arg for arg in args if arg is not type(None)]
        if len(inner) != 1 or len(args) != 2:
            raise TypeError(f"{args!r}: of unions only `X | None` can cross the wire")
        shape = self._shape(inner[0])
        pack, unpack = shape.pack, shape.unpack
        return _Shape(
            lambda value: None if value is None else pack(value),
            lambda raw, where: None if raw is None else unpack(raw, where),
            f"{shape.text}?",
        )

    def _record(self, kind: type) -> _Shape:
        hints = get_type_hints(kind)
        parts = [(item.name, self._shape(hints[item.name])) for item in fields(kind)]
        packs = [(name, shape.pack) for name, shape in parts]
        unpacks = [(name, shape.unpack) for name, shape in parts]
        names = {name for name, _ in parts}

        def pack(value: Any) -> dict[str, Any]:
            if type(value) is not kind:
                raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
            return {name: of(getattr(value, name)) for name, of in packs}

        def unpack(raw: Any, where: str) -> Any:
            if type(raw) is not dict:
                raise WireError(f"{where} isn't a map of {kind.__name__}'s fields")
            if raw.keys() != names:
                missing, extra = sorted(names - raw.keys()), sorted(map(str, raw.keys() - names))
                raise WireError(f"{where}: missing fields {missing!r:.200}, unknown fields {extra!r:.200}")
            return kind(**{name: of(raw[name], f"{where}.{name}") for name, of in unpacks})

        text = ",".join(f"{name}:{shape.text}" for name, shape in parts)
        return _Shape(pack, unpack, f"{kind.__name__}({text})")


def _scalar(kind: type, check: Callable[[Any], bool] | None = None, bound: str = "") -> _Shape:
    def unpack(raw: Any, where: str) -> Any:
        if type(raw) is not kind:
            raise WireError(f"{where} is of type {type(raw).__name__}; must be {kind.__name__}")
        if check is not None and not check(raw):
            raise WireError(f"{where} is out of bounds: {bound}")
        return raw

    def pack(value: Any) -> Any:
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise TypeError(f"{value!r:.60} is no {kind.__name__}")
        if check is not None and not check(value):
            raise ValueError(f"{value!r:.60} is out of bounds: {bound}")
        return value

    return _Shape(pack, unpack, kind.__name__)


def _packed(code: str, width: int, name: str) -> _Shape:
    def pack(values: tuple[Any, ...]) -> bytes:
        if len(values) > MAX_ITEMS:
            raise ValueError(f"{len(values)} elements; the limit is {MAX_ITEMS}")
        return array(code, values).tobytes()

    def unpack(raw: Any, where: str) -> tuple[Any, ...]:
        if type(raw) is not bytes or len(raw) % width or len(raw) > MAX_ITEMS * width:
            raise WireError(f"{where} isn't packed {name}, at most {MAX_ITEMS} of {width} bytes each")
        return struct.unpack(f"<{len(raw) // width}{code}", raw)

    return _Shape(pack, unpack, f"packed-{name}")


def _sequence(item: _Shape) -> _Shape:
    pack_item, unpack_item = item.pack, item.unpack

    def unpack(raw: Any, where: str) -> tuple[Any, ...]:
        if type(raw) is not list:
            raise WireError(f"{where} is of type {type(raw).__name__}; must be an array")
        return tuple([unpack_item(value, where) for value in raw])

    return _Shape(lambda values: [pack_item(value) for value in values], unpack, f"[{item.text}]")


def _fixed(items: list[_Shape]) -> _Shape:
    def unpack(raw: Any, where: str) -> tuple[Any, ...]:
        if type(raw) is not list or len(raw) != len(items):
            raise WireError(f"{where} isn't an array of {len(items)}")
        return tuple(item.unpack(value, where) for item, value in zip(items, raw, strict=True))

    def pack(values: tuple[Any, ...]) -> list[Any]:
        return [item.pack(value) for item, value in zip(items, values, strict=True)]

    return _Shape(pack, unpack, f"({','.join(item.text for item in items)})")


def _mapping(item: _Shape) -> _Shape:
    key = _SCALARS[str]

    def unpack(raw: Any, where: str) -> dict[str, Any]:
        if type(raw) is not dict:
            raise WireError(f"{where} is of type {type(raw).__name__}; must be a map")
        return {key.unpack(name, where): item.unpack(value, f"{where}.{name!s:.60}") for name, value in raw.items()}

    def pack(values: dict[str, Any]) -> dict[str, Any]:
        return {key.pack(name): item.pack(value) for name, value in values.items()}

    return _Shape(pack, unpack, f"{{{item.text}}}")


def _enumeration(kind: type[Enum]) -> _Shape:
    by_value = {member.value: member for member in kind}

    def unpack(raw: Any, where: str) -> Enum:
        if type(raw) is not str or raw not in by_value:
            raise WireError(f"{where} is {raw!r:.60}; must be one of {', '.join(by_value)}")
        return by_value[raw]

    return _Shape(lambda value: by_value[value.value].value, unpack, f"{kind.__name__}<{'|'.join(by_value)}>")


_SCALARS: dict[Any, _Shape] = {
    int: _scalar(int, lambda value: -MAX_INT <= value <= MAX_INT, "an integer of 63 bits"),
    float: _scalar(float),
    bool: _scalar(bool),
    str: _scalar(str),
    bytes: _scalar(bytes),
}
_PACKED = {int: _packed("i", 4, "int32"), float: _packed("d", 8, "float64")}
