"""docs/wire.md against the code: messages, fields, bounds, lanes."""

from __future__ import annotations

import dataclasses
import re

from harness.source_tree import ROOT
from unison.ipc import channel, wire
from unison.ipc.client_config import ClientConfig
from unison.ipc.messages import MESSAGES

PAGE = (ROOT / "docs/wire.md").read_text(encoding="utf-8")
KINDS = {kind.__name__: kind for kind in MESSAGES}


def test_every_message_is_listed_once_with_its_fields() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(KINDS)
    for name, fields in rows:
        assert re.findall(r"`(\w+)`", fields) == [item.name for item in dataclasses.fields(KINDS[name])], name


def test_answers_are_messages() -> None:
    for answers in re.findall(r"^\| `\w+` \|[^|]+\|[^|]+\| ([^|]+) \|$", PAGE, re.MULTILINE):
        assert set(re.findall(r"`(\w+)`", answers)) <= KINDS.keys(), answers


def test_bounds_are_the_codes_own() -> None:
    for value in (
        wire.MAX_FRAME_BYTES, wire.MAX_ITEMS, wire.MAX_ENTRIES, wire.MAX_TEXT_BYTES,
        channel.ChannelConfig().send_queue_messages,
    ):  # fmt: skip
        assert re.search(rf"\| {value}\b", PAGE), value
    assert f"`{channel.CONTROL.decode()}` control, `{channel.REQUEST.decode()}` request" in PAGE
    config = ClientConfig()
    assert f"within {config.tick_s} s" in PAGE and f"after {config.silence_s:.0f} s" in PAGE
