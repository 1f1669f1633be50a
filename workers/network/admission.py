"""Admission: how many generating requests may be inside at once.

Owns: the count. One more than allowed is refused at once, so that no queue grows out of sight. Called by routing.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...ipc.errors import CapacityError


class Admission:
    """A bounded number of slots. Belongs to one event loop."""

    def __init__(self, max_concurrent: int) -> None:
        self._max = max_concurrent
        self.num_inside = 0
        """Slots that are taken."""

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one slot.

        Raises:
            CapacityError: all are taken.
        """
        if self.num_inside >= self._max:
            raise CapacityError(f"{self._max} requests are being served, which is the limit; try again in a moment")
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1
