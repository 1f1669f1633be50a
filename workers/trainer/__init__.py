"""Training: losses, gradients, the optimizer step that ends in a live version, ledger and checkpoints.

`bin/train` puts the parts together; a loop of one's own takes what it needs from here, loaded on first use
(docs/training.md has one of 40 lines).
"""

from __future__ import annotations

from typing import Any

_HOMES = {
    "TrainablePolicy": "policy", "PolicyOptimizer": "optimizer", "OptimizerConfig": "config", "TrainConfig": "config",
    "AlgorithmConfig": "config", "LossTokens": "losses", "LossScale": "losses", "policy_loss": "losses",
    "group_normalized": "advantages", "group_centered": "advantages", "leave_one_out": "advantages",
    "Ledger": "ledger",
}  # fmt: skip
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
