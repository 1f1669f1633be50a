"""How many examples a property gets that wants another number than hypothesis' own."""

from __future__ import annotations

from hypothesis import settings


def num_examples(whole: int) -> int:
    """`whole` in a whole run; as many times fewer or more as the profile's number is below or above 100."""
    return max(1, whole * settings().max_examples // 100)
