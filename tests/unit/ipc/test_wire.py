"""The codec: strict, bounded, and nothing comes out but the types that went in."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any

import msgpack
import pytest
from unison.ipc import wire
from unison.ipc.errors import ERROR_CODES, InvalidRequestError, UnisonError, WireError
from unison.ipc.messages import CODEC, Failed, Ping, PinVersion, SubmitRequest, error_of, failure
from unison.ipc.types import GenerateRequest, OnUpdate, SamplingParams
from unison.ipc.wire import Codec

REQUEST = SubmitRequest(GenerateRequest("r", (1, 2, 3), SamplingParams(logit_bias=((1, 2.0),), seed=7)), True)


def spoiled(**changes: Any) -> bytes:
    """REQUEST's frame with fields of the request replaced; None as a key's value removes it."""
    call_id, tag, body = msgpack.unpackb(CODEC.encode(1, REQUEST))
    for name, value in changes.items():
        body["request"].pop(name, None)
        if value is not ...:
            body["request"][name] = value
    return msgpack.packb([call_id, tag, body])  # type: ignore[no-any-return]


def test_round_trip() -> None:
    assert CODEC.decode(CODEC.encode(5, REQUEST)) == (5, REQUEST)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n": ...}, "missing fields ..n"),
        ({"more": 1}, "unknown fields ..more"),
        ({"n": "1"}, "n is of type str; must be int"),
        ({"n": True}, "n is of type bool; must be int"),
        ({"n": 1.0}, "n is of type float"),
        ({"prompt_ids": [1, 2]}, "prompt_ids isn't packed int32"),
        ({"prompt_ids": b"abc"}, "prompt_ids isn't packed int32"),
        ({"on_update": "maybe"}, "must be one of finish, carry"),
        ({"pin_version": "x"}, "pin_version is of type str"),
        ({"params": []}, "params isn't a map"),
        ({"request_id": b"r"}, "request_id is of type bytes"),
    ],
)
def test_wrong_fields_are_refused_by_name(changes: dict[str, Any], says: str) -> None:
    """P4: missing, unknown and mistyped fields."""
    with pytest.raises(WireError, match=says):
        CODEC.decode(spoiled(**changes))


def test_the_types_own_checks_run() -> None:
    """R2: what decodes is still checked as if it had been made here."""
    with pytest.raises(InvalidRequestError, match="n: is 0"):
        CODEC.decode(spoiled(n=0))


@pytest.mark.parametrize(
    "frame",
    [
        b"", b"\xc1", b"\x93", msgpack.packb([]), msgpack.packb([1, "Ping"]), msgpack.packb([1, "Ping", {}, 0]),
        msgpack.packb(["1", "Ping", {}]), msgpack.packb([-1, "Ping", {}]), msgpack.packb([2**63, "Ping", {}]),
        msgpack.packb([True, "Ping", {}]), msgpack.packb([1, 2, {}]), msgpack.packb([1, "Pong!", {}]),
        msgpack.packb([1, "Ping", {1: 2}]), msgpack.packb({"a": 1}), CODEC.encode(1, Ping()) + b"\0",
        msgpack.packb([1, "Ping", msgpack.ExtType(5, b"x")]), msgpack.packb([1, "Ping", msgpack.Timestamp(1)]),
        b"\x91" * 100_000, b"\x81\xa1a" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff", b"\x93\x01\xa4Ping\x81\xa1\xff\x01",
    ],
)  # fmt: skip
def test_what_is_no_frame(frame: bytes) -> None:
    """P43: one error type, whatever comes: nesting, lengths that aren't there, extension types, broken text."""
    with pytest.raises(WireError):
        CODEC.decode(frame)


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 100)
    with pytest.raises(WireError, match="the limit of a frame is 100"):
        CODEC.encode(1, Failed("c", "x" * 200, {}))
    with pytest.raises(WireError, match="a frame of 200 bytes"):
        CODEC.open(bytes(200))


@pytest.mark.parametrize("value", [2**70, "x", None, 1.5])
def test_values_that_a_field_cannot_have_are_refused_when_sent(value: Any) -> None:
    with pytest.raises(WireError, match="PinVersion can't be encoded"):
        CODEC.encode(1, PinVersion(value))
    with pytest.raises(WireError, match="no registered message"):
        CODEC.encode(1, OnUpdate.CARRY)


def test_the_schema_digest_knows_every_field() -> None:
    """Two sides of different versions notice at once: another field, type or name is another digest."""
    digests = {
        Codec((make_dataclass("Ping", fields, frozen=True),)).schema_digest
        for fields in ([], [("a", int)], [("b", int)], [("a", float)], [("a", int), ("b", int)], [("a", int | None)])
    }
    assert len(digests) == 6
    again = make_dataclass("Ping", [("a", int)], frozen=True)
    assert Codec((again,)).schema_digest in digests


@pytest.mark.parametrize("kind", list(ERROR_CODES))
def test_errors_cross_with_class_and_attributes(kind: type[UnisonError]) -> None:
    """Each class arrives as itself, with its text and what it carries."""
    error = kind.__new__(kind)
    error.args = ("what happened",)
    attributes = {"field": "n", "option": "o", "reason": "r"}
    for name, value in attributes.items():
        setattr(error, name, value)
    error.tensors = ("a", "b")  # type: ignore[attr-defined]
    call_id, message = CODEC.decode(CODEC.encode(3, failure(error)))
    back = error_of(message)
    assert type(back) is kind and str(back) == "what happened"
    assert {name: getattr(back, name) for name in attributes} == attributes
    assert back.tensors == ("a", "b")  # type: ignore[attr-defined]


def test_an_unknown_code_is_still_an_error() -> None:
    assert type(error_of(Failed("from_the_future", "x", {}))) is UnisonError
