"""Attention: descriptors of a call, the base class, and the backends behind `select_attention`."""

from .attention import AttentionBackend
from .descriptors import (
    DecodeDescriptor,
    Descriptor,
    LayerAttention,
    LayerKV,
    PackedDescriptor,
    PrefillDescriptor,
)

__all__ = [
    "AttentionBackend",
    "DecodeDescriptor",
    "Descriptor",
    "LayerAttention",
    "LayerKV",
    "PackedDescriptor",
    "PrefillDescriptor",
]
