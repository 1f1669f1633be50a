"""ModelSpec and RopeSpec: what is read, what is refused, and by which name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from unison.engine.models.spec import FAMILIES, ModelSpec
from unison.ipc.errors import ModelError, UnsupportedModelError

BASE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip

REFUSED = [
    ("model_type", {"model_type": "mixtral"}),
    ("hidden_act", {"hidden_act": "gelu"}),
    ("quantization_config", {"quantization_config": {"bits": 4}}),
    ("final_logit_softcapping", {"final_logit_softcapping": 30.0}),
    ("num_experts", {"num_experts": 8}),
    ("a_new_option", {"a_new_option": 1}),
    ("num_key_value_heads", {"num_key_value_heads": 3}),
    ("rope_scaling", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ("rope_scaling", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
    ("rope_scaling", {"rope_scaling": {"rope_type": "linear"}}),
    ("rope_scaling", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "surprise": 1}}),
    ("layer_types", {"layer_types": ["chunked_attention"] * 4}),
    ("layer_types", {"layer_types": ["sliding_attention"] * 4}),
    ("no_rope_layers", {"no_rope_layers": [1, 0, 1, 0]}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
]


@pytest.mark.parametrize("option,extra", REFUSED)
def test_unsupported_options_are_refused_by_name(option: str, extra: dict[str, Any]) -> None:
    """P50, P4: never silently wrong logits: what isn't implemented is named."""
    with pytest.raises(UnsupportedModelError) as caught:
        ModelSpec.from_config(BASE | extra)
    assert caught.value.option == option


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, -1, "8", True])
def test_sizes_are_positive_integers(key: str, value: object) -> None:
    """P4: a size that is missing or no size is named."""
    with pytest.raises(ModelError, match=key):
        ModelSpec.from_config(BASE | {key: value})


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_that_transformers_writes_by_default_is_understood(family: str) -> None:
    """P50: a family's default configuration, as save_pretrained writes it, is read without complaint."""
    config = json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False))
    spec = ModelSpec.from_config(config)
    assert (spec.family, spec.num_layers) == (family, config["num_hidden_layers"])


def test_every_eos_id_is_read(tmp_path: Path) -> None:
    """P23: generation_config.json wins, one id or several."""
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"eos_token_id": 9}))
    assert ModelSpec.from_dir(tmp_path).eos_token_ids == (9,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert ModelSpec.from_dir(tmp_path).eos_token_ids == (7, 8)


def test_unreadable_directories(tmp_path: Path) -> None:
    """P4: what is missing or broken is said, with what to do."""
    with pytest.raises(ModelError, match="bin/fetch-model"):
        ModelSpec.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="JSON"):
        ModelSpec.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="object"):
        ModelSpec.from_dir(tmp_path)
