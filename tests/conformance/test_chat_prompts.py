"""The real model in float32 against transformers: 50 varied prompts, logits and greedy tokens.

Logits are compared with transformers in float64: in float32 its own error on this model is up to 1.3e-4, ours 5e-5, so
the difference of the two would say more of it than of us. Greedy tokens are those of transformers in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from unison.engine.config import CacheConfig, EngineConfig
from unison.engine.engine import Engine
from unison.engine.models.packed import packed_forward
from unison.ipc.types import FinishReason, SamplingParams

pytestmark = [pytest.mark.slow]

NUM_TOKENS = 6
EXACT_EVERY = 6
"""Every so many prompts is also compared in float64, and with `generate`, which are slow."""
QUESTIONS = [
    "What is the capital of France?", "Name three primary colours.", "Why is the sky blue?",
    "Count from one to five.", "Who wrote Hamlet?", "What is 12 times 12?", "Give me a synonym for 'happy'.",
    "Explain gravity to a child.", "What do bees make?", "Which planet is the largest?",
    "Translate 'good morning' to Spanish.", "What is a prime number?", "Write a haiku about rain.",
    "How do I boil an egg?", "What's the boiling point of water in Fahrenheit?", "def fibonacci(n):",
    "Write a Python function that reverses a string.", "SELECT name FROM users WHERE", "for (int i = 0; i <",
    "#include <stdio.h>\nint main() {", "Fix this code: pritn('hello')", "What does `git rebase` do?",
    "let x = [1, 2, 3].map(", "<html><body><h1>", "import numpy as np\n", "用中文介绍一下北京。",
    "日本の首都はどこですか？", "안녕하세요, 잘 지내세요?", "什么是机器学习？", "ありがとうございます",
    "写一首关于春天的诗", "서울의 날씨는 어때요?", "🎉🎉🎉 What are these?", "😀 😃 😄",
    "Describe 🍕 in one word.", "👩‍👩‍👧‍👦 family", "Ünïcödé tëxt with àccénts", "¿Dónde está la biblioteca?",
    "Wie spät ist es?", "Où est le chat ?", "Как дела?", "مرحبا", "a", "   ", "\n\n\n", "1+1=",
    "AAAAAAAAAAAAAAAAAAAAAAAA", "The quick brown fox jumps over the lazy dog. " * 8,
]  # fmt: skip


class Both(NamedTuple):
    """The two sides."""

    engine: Engine
    model: Any
    exact_model: Any
    tokenizer: Any


@pytest.fixture(scope="module")
def both(model_dir: Path) -> Both:
    """Unison's engine in float32; transformers in float32 and float64."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = Engine.from_pretrained(model_dir, EngineConfig(dtype="float32", cache=CacheConfig(num_tokens=8192)))
    model, exact_model = (
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    return Both(engine, model, exact_model, AutoTokenizer.from_pretrained(model_dir))


def prompts(tokenizer: Any) -> list[list[int]]:
    """48 questions through the chat template, a prompt of one token and one of 2000."""
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in QUESTIONS
    ]
    long = tokenizer("The history of the sea is long and full of ships. " * 300)["input_ids"][:2000]
    return [*chats, [504], long]


@torch.inference_mode()
def test_fifty_prompts(both: Both) -> None:
    """S35: logits within 1e-4 of transformers, and the same greedy tokens."""
    every = prompts(both.tokenizer)
    assert len(every) == 50 and [len(ids) for ids in every[-2:]] == [1, 2000]
    parts = both.engine._parts
    weights = parts.guard.weights_of(0)
    outputs = both.engine.run_batch(every, SamplingParams(max_tokens=NUM_TOKENS, temperature=0))
    for index, (ids, output) in enumerate(zip(every, outputs, strict=True)):
        tokens = list(output.completions[0].token_ids)
        assert len(tokens) == NUM_TOKENS or output.completions[0].finish_reason is FinishReason.STOP
        ours = parts.decoder.logits(weights, packed_forward(parts.decoder, weights, parts.attention, [ids])[-64:])
        keep, inputs = min(64, len(ids)), torch.tensor([ids])
        # One forward over prompt and answer: each token of a greedy answer is the likeliest after those before it.
        whole = torch.tensor([[*ids, *tokens[:-1]]])
        theirs = both.model(whole, logits_to_keep=keep + len(tokens) - 1).logits[0]
        assert (ours - theirs[:keep]).abs().max() <= 2e-4, ids[:8]
        assert theirs[keep - 1 :].argmax(-1).tolist() == tokens, both.tokenizer.decode(ids[-30:])
        if index % EXACT_EVERY == 0 or len(ids) == 1:
            assert (ours - both.exact_model(inputs, logits_to_keep=keep).logits[0]).abs().max() <= 1e-4, ids[:8]
            mask = torch.ones_like(inputs)
            generated = both.model.generate(inputs, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False)
            assert generated[0, len(ids) :].tolist() == tokens, both.tokenizer.decode(ids[-30:])
