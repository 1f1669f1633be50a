"""Decode tapes: on the CPU, steady decode as one native call for the whole forward pass.

Owns: the tapes, one per weight set and number of rows, and their memory. A tape reads the workspace's buffers and one
version's weights at fixed addresses; it is dropped together with that version, so it never outlives the tensors it
points to (P14). The CPU's counterpart of graph.py; used by the executor.

Shapes: B rows · V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from ...ipc.errors import InvariantError
from ..attention import DecodeDescriptor
from ..kernels.build import library
from ..kernels.tape import Tape, recording
from .graph import Forward
from .workspace import StepInputs

MAX_TAPES = 8
"""Most tapes held; each has the logits and one layer's activations of its rows."""


@dataclass(frozen=True, eq=False)
class _Recorded:
    tape: Tape
    logits_BV: Tensor


class DecodeTapes:
    """Records a forward pass when it first runs for a number of rows, and replays it from then on.

    Invariant: a tape is replayed only if its recording, or one of two rows or more before it, which goes the same way
    through the code, was watched and found to consist of native calls alone. Where it doesn't, `why_not` says so and
    every step runs in Python.
    """

    def __init__(self, inputs: StepInputs, block_size: int, forward: Forward) -> None:
        self._inputs = inputs
        self._block_size = block_size
        self._forward = forward
        self._recorded: OrderedDict[tuple[int, int], _Recorded] = OrderedDict()
        self._is_proven = False
        self.why_not: str | None = None
        """Why nothing is replayed; None where tapes work."""

    def logits(self, ordinal: int, num_rows: int, max_kv_len: int) -> Tensor:
        """Logits [num_rows, V] of the rows staged in the workspace; valid until the next call."""
        key = (ordinal, num_rows)
        recorded = self._recorded.get(key)
        if recorded is None:
            return self._record(key, max_kv_len)
        self._recorded.move_to_end(key)
        failed = recorded.tape.replay()
        if failed is not None:
            raise InvariantError(f"{failed[0]} returned {failed[1]} in a replayed step; run with runtime.tapes=false")
        return recorded.logits_BV

    def forget(self, ordinal: int) -> None:
        """Drop every tape over a version's weights; call before they may be freed or written."""
        for key in [key for key in self._recorded if key[0] == ordinal]:
            del self._recorded[key]

    def _record(self, key: tuple[int, int], max_kv_len: int) -> Tensor:
        ordinal, rows = key
        inputs = self._inputs
        tables, lengths = inputs.block_tables_RB[:rows], inputs.seq_lens_R[:rows]
        descriptor = DecodeDescriptor(tables, self._block_size, lengths, max_kv_len)
        arguments = (inputs.token_ids_T[:rows], inputs.positions_T[:rows], inputs.slots_T[:rows], descriptor)
        lib = library()
        if self.why_not is not None or lib is None:
            return self._forward(ordinal, *arguments)
        tape = Tape(lib)
        with recording(tape, is_watched=not self._is_proven):
            logits = self._forward(ordinal, *arguments)
        self.why_not = tape.why_not
        if self.why_not is None:
            self._is_proven = self._is_proven or rows > 1
            tape.keep((arguments, logits))
            self._recorded[key] = _Recorded(tape, logits)
            if len(self._recorded) > MAX_TAPES:
                self._recorded.popitem(last=False)
        return logits
