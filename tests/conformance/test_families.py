"""Every family on tiny random float32 models against transformers: the same logits, the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from unison.engine.attention import AttentionBackend, select_attention
from unison.engine.kernels import Kernels, select_kernels
from unison.engine.models.decoder import Decoder
from unison.engine.models.layout import WeightLayout
from unison.engine.models.loader import load
from unison.engine.models.packed import packed_forward
from unison.engine.models.spec import ModelSpec

CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500000.0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-mha-untied": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": False},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-linear": {"model_type": "llama", "rope_parameters": LINEAR},
    "llama-llama3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama-yarn": {"model_type": "llama", "rope_parameters": YARN},
    "llama-yarn-factor": {"model_type": "llama", "rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 8.0}},
    "llama-yarn-mscale": {"model_type": "llama", "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3"},
    "qwen3-bias-wide-heads": {"model_type": "qwen3", "attention_bias": True, "head_dim": 24},
    "smollm3": {"model_type": "smollm3"},
    "smollm3-nope": {"model_type": "smollm3", "no_rope_layers": [1, 0, 0, 1], "tie_word_embeddings": False},
}  # fmt: skip
PROMPTS = [[5, 9, 20, 33, 7], [4], list(range(3, 90)), [11, 12, 13] * 7]


def reference(case: dict[str, Any], directory: Path) -> Any:
    """A random transformers model with norms and biases that matter, saved to `directory`."""
    torch.manual_seed(3)
    options = BASE | case
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def backends(choice: str) -> tuple[Kernels, AttentionBackend]:
    return select_kernels(CPU, choice), select_attention(CPU, choice, True, 64, 16)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_family_equals_transformers(name: str, tmp_path: Path) -> None:
    """P50: the same logits to 1e-5 with native and with torch kernels, and exactly transformers' parameter names."""
    model = reference(CASES[name], tmp_path)
    spec = ModelSpec.from_dir(tmp_path)
    layout = WeightLayout(spec, torch.float32)
    views = load(tmp_path, layout, CPU)
    assert set(views) == set(model.state_dict())
    assert all(torch.equal(views[key], value) for key, value in model.state_dict().items())
    wanted = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    for choice in ("native", "torch"):
        kernels, attention = backends(choice)
        decoder, weights = Decoder(spec, kernels), layout.bind(views)
        logits = decoder.logits(weights, packed_forward(decoder, weights, attention, PROMPTS))
        assert (logits - wanted).abs().max() <= 1e-5, choice


def test_older_spelling_of_rope(tmp_path: Path) -> None:
    """P50: `rope_theta` and `rope_scaling` of older files mean what `rope_parameters` means."""
    common = BASE | {"model_type": "llama"}
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = ModelSpec.from_config(common | {"rope_theta": 500000.0, "rope_scaling": scaling})
    assert old == ModelSpec.from_config(common | {"rope_parameters": LLAMA3})
