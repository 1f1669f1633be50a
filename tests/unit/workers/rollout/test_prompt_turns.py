"""Turns of a conversation as the template sees them, and the tokens that begin and end what the model is given."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from harness.byte_tokenizer import byte_tokenizer, ids_of
from tokenizers import processors
from unison.ipc.errors import InvalidRequestError
from unison.workers.rollout.prompts import Prompt, PromptRenderer, messages_of, messages_of_columns

BOS = 1
STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}[SYS]{% elif m['role'] == 'user' %}[USR]"
    "{% elif m['role'] == 'assistant' %}[AST]{% else %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ m['content'] }}[END]{% endfor %}{% if add_generation_prompt %}[AST]{% endif %}"
)
"""Tells the three roles apart, and knows no other."""
COLUMNS = ("instruction", "input", "output")
MARKERS = ("[SYS]", "[USR]", "[AST]")


def rendered(prompt: Prompt, template: str = STRICT_TEMPLATE, system_prompt: str = "") -> str:
    """What the model reads."""
    tokenizer = byte_tokenizer(template)
    return str(tokenizer.decode(PromptRenderer(tokenizer, system_prompt).encode(prompt)))


def bos_adding_tokenizer(template: str) -> Any:
    """As Llama's: it puts a BOS token before whatever it encodes, unless it is told not to."""
    tokenizer = byte_tokenizer(template)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    assert tokenizer("a")["input_ids"] == [BOS, *ids_of("a")]
    return tokenizer


@pytest.mark.parametrize("present", list(product([True, False], repeat=3)), ids=str)
@pytest.mark.parametrize("empty", ["", "  \n", None])
def test_each_column_that_is_there_is_one_turn(present: tuple[bool, ...], empty: str | None) -> None:
    """S30: never two columns in one turn, never an empty turn, always in the order system, user, assistant."""
    texts = [f"text of {name}" if is_there else empty for name, is_there in zip(COLUMNS, present, strict=True)]
    messages = messages_of(dict(zip(COLUMNS, texts, strict=True)))
    expected = [
        {"role": role, "content": f"text of {name}"}
        for name, role, is_there in zip(COLUMNS, ("system", "user", "assistant"), present, strict=True) if is_there
    ]  # fmt: skip
    assert list(messages) == expected


def test_columns_that_a_row_lacks_are_no_turns() -> None:
    """S30: a missing column is an empty one; other columns are none of the model's business."""
    assert messages_of({"input": "hi", "answer": "4"}) == ({"role": "user", "content": "hi"},)
    assert messages_of({}) == ()
    assert messages_of({"input": 7}) == ({"role": "user", "content": "7"},)


def test_text_is_kept_as_it_is() -> None:
    """S30: blanks around a text decide whether it is empty, and stay in it."""
    assert messages_of({"input": " hi\n"})[0]["content"] == " hi\n"


@pytest.mark.parametrize("lengths", list(product([1, 2], repeat=3))[1:-1], ids=str)
def test_ragged_columns_are_refused(lengths: tuple[int, int, int]) -> None:
    """S31: whichever list is the short one; nothing is cut off silently."""
    instructions, inputs, outputs = (["x"] * length for length in lengths)
    with pytest.raises(ValueError):
        messages_of_columns(instructions, inputs, outputs)


def test_columns_are_zipped_in_their_order() -> None:
    """S31: row i is made of the three lists' entries i; no rows are no conversations."""
    count = 20
    found = messages_of_columns(*([f"{name}{at}" for at in range(count)] for name in "abc"))
    assert [[turn["content"] for turn in turns] for turns in found] == [[f"{name}{at}" for name in "abc"]
                                                                        for at in range(count)]  # fmt: skip
    assert messages_of_columns([], [], []) == []


def test_the_template_sees_three_roles() -> None:
    """S32: each role by its own marker, in order, with its own text; the last assistant turn stays open."""
    messages = messages_of({"instruction": "be brief", "input": "hi", "output": "well"})
    assert rendered(Prompt("p", messages)) == "[SYS]be brief[END][USR]hi[END][AST]well"
    for present in product([True, False], repeat=3):
        texts = {name: name for name, is_there in zip(COLUMNS, present, strict=True) if is_there}
        if texts:
            text = rendered(Prompt("p", messages_of(texts)))
            expected = {m for m, is_there in zip(MARKERS, present, strict=True) if is_there} | {"[AST]"}
            assert {marker for marker in MARKERS if marker in text} == expected and text.count("[AST]") == 1


def test_long_conversations_keep_their_turns() -> None:
    """S32: every turn once and in order, however often the roles change; the model's turn begins at the end."""
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = tuple({"role": role, "content": f"turn {at}"} for at, role in enumerate(roles))
    marker_of = dict(zip(("system", "user", "assistant"), MARKERS, strict=True))
    body = "".join(f"{marker_of[role]}turn {at}[END]" for at, role in enumerate(roles))
    assert rendered(Prompt("p", messages)) == body + "[AST]"


def test_an_unknown_role_is_refused() -> None:
    """What the template refuses is an error with the prompt's id, for the rollout to be rejected by."""
    with pytest.raises(InvalidRequestError, match="'the-id'.*unknown role"):
        rendered(Prompt("the-id", ({"role": "tool", "content": "x"},)))


def test_the_system_prompt_of_the_configuration() -> None:
    """It is a turn of its own before conversations without one; never in a plain text, never a second one."""
    user = {"role": "user", "content": "hi"}
    assert rendered(Prompt("p", (user,)), system_prompt="be kind") == "[SYS]be kind[END][USR]hi[END][AST]"
    own = Prompt("p", ({"role": "system", "content": "own"}, user))
    assert rendered(own, system_prompt="be kind") == "[SYS]own[END][USR]hi[END][AST]"
    assert rendered(Prompt("p", text="hi"), system_prompt="be kind") == "hi"


def test_rendering_changes_nothing() -> None:
    """The same prompt gives the same tokens every time: its messages aren't touched."""
    prompt = Prompt("p", ({"role": "user", "content": "hi"},))
    renderer = PromptRenderer(byte_tokenizer(STRICT_TEMPLATE), "be kind")
    assert renderer.encode(prompt) == renderer.encode(prompt)
    assert prompt.messages == ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize("start", ["<s>", "{{ bos_token }}"])
def test_a_tokenizer_that_adds_bos_adds_none_to_a_chat(start: str) -> None:
    """P22: the template has written it; the tokenizer, which would add its own, is told not to."""
    renderer = PromptRenderer(bos_adding_tokenizer(start + STRICT_TEMPLATE))
    ids = renderer.encode(Prompt("p", ({"role": "user", "content": "hi"},)))
    assert ids == (BOS, *ids_of("[USR]hi[END][AST]"))


def test_a_template_without_bos_gets_none() -> None:
    """P22: the template's author has the last word, also where the tokenizer would add one."""
    renderer = PromptRenderer(bos_adding_tokenizer(STRICT_TEMPLATE))
    assert renderer.encode(Prompt("p", ({"role": "user", "content": "hi"},)))[0] != BOS


def test_a_plain_text_has_what_the_tokenizer_adds() -> None:
    """P22: a text has been through no template, so the tokenizer's BOS is its only one."""
    assert PromptRenderer(bos_adding_tokenizer(STRICT_TEMPLATE)).encode(Prompt("p", text="hi")) == (BOS, *ids_of("hi"))


def test_a_doubled_bos_is_refused() -> None:
    """P22: a template that writes it twice is refused, with the prompt's id; one inside the text is the user's."""
    for count in (2, 3):
        renderer = PromptRenderer(bos_adding_tokenizer("<s>" * count + STRICT_TEMPLATE))
        with pytest.raises(InvalidRequestError, match="'the-id' begins with two BOS"):
            renderer.encode(Prompt("the-id", ({"role": "user", "content": "hi"},)))
    renderer = PromptRenderer(bos_adding_tokenizer("<s>" + STRICT_TEMPLATE))
    ids = renderer.encode(Prompt("p", ({"role": "user", "content": "a<s>b"},)))
    assert ids == (BOS, *ids_of("[USR]a"), BOS, *ids_of("b[END][AST]"))


def test_a_chat_of_no_tokens_is_refused() -> None:
    """A template that renders nothing leaves the engine nothing to begin with."""
    with pytest.raises(InvalidRequestError, match="'the-id' has no tokens"):
        rendered(Prompt("the-id", ({"role": "user", "content": "hi"},)), "{{ '' }}")


def test_what_is_a_conversation() -> None:
    """Messages make a conversation; without them a prompt is its text."""
    assert Prompt("p", ({"role": "user", "content": ""},)).is_chat and not Prompt("p", text="x").is_chat
