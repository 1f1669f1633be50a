"""Prompts and their token ids."""

from __future__ import annotations

from typing import Any

import pytest
from harness.byte_tokenizer import byte_tokenizer, ids_of
from unison.ipc.errors import InvalidRequestError
from unison.workers.rollout.prompts import Prompt, PromptRenderer, messages_of, messages_of_columns

BOS = 1


def renderer(system_prompt: str = "", template: str | None = "default") -> PromptRenderer:
    return PromptRenderer(byte_tokenizer() if template == "default" else byte_tokenizer(template), system_prompt)


def chat(*turns: tuple[str, str]) -> Prompt:
    return Prompt("p", tuple({"role": role, "content": text} for role, text in turns))


def test_instruction_columns_become_turns() -> None:
    """S30: instruction → system, input → user, output → assistant; separate, and empty ones left out."""
    whole = messages_of({"instruction": "be brief", "input": "hi", "output": "yo"})
    assert whole == (
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
    )  # fmt: skip
    assert messages_of({"instruction": " ", "input": "hi", "output": None}) == ({"role": "user", "content": "hi"},)


def test_parallel_columns_are_zipped() -> None:
    """S31: lists as a collate function delivers them, in order; ragged ones are refused."""
    found = messages_of_columns(["a", ""], ["b", "c"], ["", "d"])
    assert [[turn["role"] for turn in turns] for turns in found] == [["system", "user"], ["user", "assistant"]]
    with pytest.raises(ValueError):
        messages_of_columns(["a"], ["b", "c"], ["d", "e"])


def test_all_roles_are_rendered_in_order() -> None:
    """S32: the template tells system, user and assistant apart; a last assistant turn is gone on with."""
    prompt = Prompt("p", messages_of({"instruction": "INS", "input": "INP", "output": "OUT"}))
    text = byte_tokenizer().decode(renderer().encode(prompt))
    places = [text.index(word) for word in ("system", "INS", "user", "INP", "assistant", "OUT")]
    assert places == sorted(places) and text.endswith("OUT")


def test_generation_prompt_and_system_prompt() -> None:
    """A conversation ends where the model's turn begins; the configured system turn is put before, once."""
    text = byte_tokenizer().decode(renderer("SYS").encode(chat(("user", "hi"))))
    assert text.index("SYS") < text.index("hi") and text.rstrip().endswith("assistant")
    own = byte_tokenizer().decode(renderer("SYS").encode(chat(("system", "own"), ("user", "hi"))))
    assert "SYS" not in own


def test_one_bos() -> None:
    """P22: a template that writes the BOS token itself gets no second one; a doubled one is refused."""
    with_bos = "<s>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert renderer(template=with_bos).encode(chat(("user", "ab"))) == (BOS, *ids_of("ab"))
    with pytest.raises(InvalidRequestError, match="two BOS"):
        renderer(template="<s>" + with_bos).encode(chat(("user", "ab")))
    with pytest.raises(InvalidRequestError, match="two BOS"):
        renderer("SYS", with_bos).encode(chat(("system", "<s>"), ("user", "<s>ab")))
    assert renderer().encode(Prompt("p", text="<s>ab")) == (BOS, *ids_of("ab"))


def test_texts_and_refusals() -> None:
    """Plain texts go as they are; no tokens, no template and a template's refusal are errors that name the prompt."""
    assert renderer().encode(Prompt("p", text="abc")) == tuple(ids_of("abc"))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        renderer().encode(Prompt("p", text=""))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        renderer(template=None).encode(chat(("user", "x")))
    with pytest.raises(InvalidRequestError, match="refuses 'p'"):
        renderer(template="{{ raise_exception('no') }}").encode(chat(("user", "x")))


def test_decode_leaves_special_tokens_out() -> None:
    """P23: reward functions read the text, not the turn's end."""
    end: Any = byte_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert renderer().decode([*ids_of("word"), end]) == "word"
