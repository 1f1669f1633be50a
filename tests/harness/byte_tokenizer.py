"""A tokenizer with a token per byte, and a chat template: small enough for the tiny model, and of the usual kind."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BYTES_FROM = 5
"""Id of byte 0."""
VOCAB_SIZE = BYTES_FROM + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call><|im_end|>\n"
    "{% endif %}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """A fast tokenizer of transformers: ids 0 … 4 are special (2 and 3 end a turn), the others are bytes."""
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<|im_end|>", "<|im_start|>"]
    vocabulary = {token: index for index, token in enumerate(special)}
    by_byte = byte_characters()
    vocabulary |= {by_byte[byte]: BYTES_FROM + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=chat_template
    )


def byte_characters() -> dict[int, str]:
    """The character that stands for each byte in byte-level vocabularies."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def ids_of(text: str) -> list[int]:
    """Token ids of a text without special tokens."""
    return [BYTES_FROM + byte for byte in text.encode()]
