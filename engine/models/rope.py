"""Rotary position embedding: frequencies per scaling rule, and the table of cosines and sines.

Owns: the formulas. Source: Su et al. 2021 (RoFormer), sec. 3; linear interpolation: Chen et al. 2023; YaRN: Peng et al.
2023, sec. 3; llama3: the Llama 3.1 release. Called by the spec (parsing) and the decoder (table).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ipc.errors import UnsupportedModelError

_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        "factor attention_factor mscale mscale_all_dim beta_fast beta_slow truncate "
        "original_max_position_embeddings".split()
    ),
}
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True)
class RopeSpec:
    """One rule for all rotated layers."""

    theta: float
    """Base of the frequencies."""
    rotary_dim: int
    """Dimensions of a head, all of which are rotated; even."""
    kind: str = "default"
    """`default`, `linear`, `llama3` or `yarn`."""
    options: tuple[tuple[str, Any], ...] = ()
    """The kind's own parameters, sorted by name."""

    @staticmethod
    def from_config(config: Mapping[str, Any], head_dim: int, default_theta: float) -> RopeSpec:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4)."""
        given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _KEYS:
            raise UnsupportedModelError("rope_scaling", f"has rope_type {kind!r}; implemented are {', '.join(_KEYS)}")
        unknown = set(given) - _KEYS[kind] - _COMMON - {"original_max_position_embeddings"}
        if unknown:
            raise UnsupportedModelError("rope_scaling", f"of type {kind} has unknown keys {sorted(unknown)}")
        theta = given.get("rope_theta", config.get("rope_theta", default_theta))
        rotary = given.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
        if rotary != 1.0:
            raise UnsupportedModelError("partial_rotary_factor", f"is {rotary}; whole heads are rotated here")
        options = {key: given[key] for key in _KEYS[kind] if given.get(key) is not None}
        if kind in ("llama3", "yarn"):
            options.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
        required = {"linear": {"factor"}, "llama3": _KEYS["llama3"], "yarn": {"factor"}}.get(kind, frozenset())
        if missing := sorted(set(required) - set(options)):
            raise UnsupportedModelError("rope_scaling", f"of type {kind} lacks {', '.join(missing)}")
        return RopeSpec(float(theta), head_dim, kind, tuple(sorted(options.items())))

    def table(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [num_positions, rotary_dim / 2], attention factor included."""
        frequencies, factor = self._frequencies()
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
        return angles.cos() * factor, angles.sin() * factor

    def _frequencies(self) -> tuple[Tensor, float]:
        """Inverse wavelengths [rotary_dim / 2] and the factor on cosines and sines."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).float() / self.rotary_dim
        plain = 1.0 / (self.theta**exponents)
        options = dict(self.options)
        if self.kind == "linear":
            return plain / options["factor"], 1.0
        if self.kind == "llama3":
            return _llama3(plain, options), 1.0
        if self.kind == "yarn":
            return self._yarn(plain, options)
        return plain, 1.0

    def _yarn(self, plain: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, float]:
        """YaRN: interpolate long wavelengths, keep short ones, ramp between; scale attention by its temperature."""
        factor, context = options["factor"], options["original_max_position_embeddings"]

        def dimension(rotations: float) -> float:
            return self.rotary_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(options.get("beta_fast") or 32), dimension(options.get("beta_slow") or 1)
        if options.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        span = (high - low) or 0.001
        kept = 1 - ((torch.arange(self.rotary_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
        interpolated = 1.0 / (factor * (self.theta ** (torch.arange(0, self.rotary_dim, 2).float() / self.rotary_dim)))
        scale = options.get("attention_factor")
        if scale is None:
            mscale, mscale_all = options.get("mscale"), options.get("mscale_all_dim")
            scale = (
                _mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all else _mscale(factor, 1)
            )
        return interpolated * (1 - kept) + plain * kept, float(scale)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(plain: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    factor, context = options["factor"], options["original_max_position_embeddings"]
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    wavelengths = 2 * math.pi / plain
    smooth = (context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * (plain / factor) + smooth * plain
    scaled = torch.where(wavelengths > context / low, plain / factor, plain)
    is_between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(is_between, blended, scaled)
