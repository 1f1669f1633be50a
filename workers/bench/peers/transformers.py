"""transformers' `generate`: its default attention (sdpa), a static batch, log-probs computed from its logits.

Owns: how it is called. Runs in a process of its own, in the bench's environment.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from .protocol import Load, Loaded, Work, count_tokens, speak, stop_tokens


def load(request: Load) -> Loaded:
    """The model in `request.dtype`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(request.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(request.model, dtype=getattr(torch, request.dtype))
    stops = stop_tokens(request.model)

    @torch.inference_mode()
    def run(work: Work) -> tuple[float, int]:
        longest = max(map(len, work.prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in work.prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in work.prompts])
        options: dict[str, Any] = {"do_sample": work.temperature > 0, "num_return_sequences": work.n}
        if work.temperature:
            options |= {"temperature": work.temperature, "top_k": 0, "top_p": 1.0}
        if work.ignore_eos:
            options["min_new_tokens"] = work.max_tokens
        started = time.perf_counter()
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=work.max_tokens, return_dict_in_generate=True,
            output_logits=True, pad_token_id=0, **options,
        )  # fmt: skip
        tokens = out.sequences[:, longest:]
        for step, logits in enumerate(out.logits):
            torch.log_softmax(logits.float(), -1).gather(1, tokens[:, step : step + 1])
        seconds = time.perf_counter() - started
        return seconds, count_tokens(tokens.tolist(), stops, work)

    return Loaded(run, ("transformers", "torch"), "all", "generate, static batch padded on the left, sdpa attention")


if __name__ == "__main__":
    sys.exit(speak(load))
