"""Executor: runs a step plan on the device: inputs, forward pass, logits, draws.

Owns: the workspace, the KV tensors, and the device state that steady decode reuses (last drawn tokens, positions,
sampling tensors). Knows nothing of queues or versions beyond "these weights for this sub-batch". Whether that state may
be reused is decided by `RequestCaches.bind` alone (R4, S5); there is no second predicate here. Called by the stepper.

Shapes: T rows of a forward pass (decodes, then prefill chunks) · R rows that draw a token · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...ipc.types import TopLogprobs
from ..attention import AttentionBackend, DecodeDescriptor, LayerAttention, LayerKV, PrefillDescriptor
from ..cache.buffer import KVBuffer
from ..cache.requests import Binding, RequestCaches
from ..models.decoder import Decoder
from ..models.layout import DecoderWeights
from ..plan import BatchResult, Chunk, StepPlan, StepResult, SubBatch
from ..request import Sequence
from .graph import DecodeGraphs
from .sample import RowSampling, Sampled, Sampler, SamplingBatch
from .tapes import DecodeTapes
from .workspace import Workspace

Scores = tuple[tuple[Chunk, np.ndarray, list[TopLogprobs]], ...]
"""Per scoring chunk: log-probs of the prompt tokens that follow its positions, and their alternatives."""
_SCORE_ROWS = 64
"""Prompt positions whose logits are held at once while a prompt is scored."""


@dataclass(frozen=True, eq=False)
class _Inputs:
    """Device inputs of one forward pass."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    decode: DecodeDescriptor | None
    prefill: PrefillDescriptor | None


@dataclass(frozen=True, eq=False)
class _Steady:
    """What the next step may reuse if it binds to the very same sequences."""

    inputs: _Inputs
    sampling: SamplingBatch
    token_ids_R: Tensor


class Executor:
    """One model on one device.

    Invariant: `_steady` describes exactly the sequences of the last `bind`; `bind` says whether the present ones equal
    them.
    """

    def __init__(
        self, decoder: Decoder, attention: AttentionBackend, sampler: Sampler, buffer: KVBuffer, caches: RequestCaches,
        workspace: Workspace, penalty_window: int, weights_of: Callable[[int], DecoderWeights],
    ) -> None:  # fmt: skip
        spec = decoder.spec
        self._decoder = decoder
        self._attention = attention
        self._sampler = sampler
        self._buffer = buffer
        self._caches = caches
        self._workspace = workspace
        self._penalty_window = penalty_window
        self._block_size = caches.pool.strategy.block_size
        self._layers = [
            (LayerAttention(spec.attention_scale, spec.windows[index]), LayerKV(*buffer.layer(index)))
            for index in range(spec.num_layers)
        ]
        self._weights_of = weights_of
        self._graphs: DecodeGraphs | DecodeTapes | None = None
        self._steady: _Steady | None = None

    def capture_decodes(self) -> None:
        """From now on run pure decodes through CUDA graphs, or through tapes of native calls on the CPU."""
        is_cpu = self._workspace.host is self._workspace.device
        self._graphs = (DecodeTapes if is_cpu else DecodeGraphs)(
            self._workspace.device, self._block_size, self._decode_logits
        )

    @property
    def decode_path(self) -> str:
        """How steady decode runs, for status."""
        graphs = self._graphs
        if isinstance(graphs, DecodeTapes):
            return "tapes" if graphs.why_not is None else f"python: {graphs.why_not}"
        return "python" if graphs is None else "CUDA graphs"

    def forget_version(self, ordinal: int) -> None:
        """Nothing may point to this version's tensors any more."""
        if self._graphs is not None:
            self._graphs.forget(ordinal)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run every sub-batch of the plan under its own version's weights (V3)."""
        if plan.copies:
            self._buffer.copy_blocks([(copy.src, copy.dst) for copy in plan.copies], self._block_size)
        return StepResult(tuple(self._run_batch(batch, plan) for batch in plan.batches))

    def _run_batch(self, batch: SubBatch, plan: StepPlan) -> BatchResult:
        binding = self._bind(batch, plan)
        steady = self._steady
        if binding is not None and binding.is_steady and steady is not None:
            inputs = self._advance(steady, binding)
            steady.sampling.advance(steady.token_ids_R)
            sampling: SamplingBatch | None = steady.sampling
        else:
            inputs = self._stage(batch)
            draws = [seq for chunk in batch.chunks for seq in chunk.draws]
            sampling = (
                self._sampler.prepare([self._row(seq) for seq in draws], [seq.generated for seq in draws])
                if draws
                else None
            )
        if self._graphs is not None and binding is not None and inputs.decode is not None:
            logits = self._graphs.logits(batch.version, len(batch.decodes), inputs.decode.max_kv_len)
            scores: Scores = ()
        else:
            weights = self._weights_of(batch.version)
            hidden = self._decoder.forward(weights, inputs.token_ids_T, inputs.positions_T, self._attend(inputs))
            scores = self._score_prompts(batch, weights, hidden)
            if sampling is None:
                return _no_draws(scores)
            logits = self._draw_logits(batch, weights, hidden)
        assert sampling is not None
        sampled = self._sampler.sample(logits, sampling)
        if binding is not None:
            self._steady = _Steady(inputs, sampling, sampled.token_ids)
        return _to_host(sampled, scores)

    def _decode_logits(
        self, ordinal: int, token_ids: Tensor, positions: Tensor, slots: Tensor, descriptor: DecodeDescriptor
    ) -> Tensor:
        """The forward pass that a graph captures."""
        weights = self._weights_of(ordinal)
        inputs = _Inputs(token_ids, positions, slots, descriptor, None)
        return self._decoder.logits(weights, self._decoder.forward(weights, token_ids, positions, self._attend(inputs)))

    def _bind(self, batch: SubBatch, plan: StepPlan) -> Binding | None:
        """Ask the caches whether this is the same pure decode as the step before; anything else forgets that step."""
        is_pure = not batch.prefills and len(plan.batches) == 1
        if not is_pure or any(chunk.forks or chunk.scores_prompt or not chunk.draws for chunk in batch.decodes):
            self._caches.unbind()
            self._steady = None
            return None
        sequences = [chunk.sequence for chunk in batch.decodes]
        return self._caches.bind(tuple(seq.identity for seq in sequences), [chunk.cache for chunk in batch.decodes])

    def _row(self, seq: Sequence) -> RowSampling:
        request = seq.request
        window = request.spec.params.penalty_window
        return RowSampling(
            params=request.spec.params,
            seed=request.seed,
            sample_index=seq.index,
            eos_ids=request.stop_ids,
            window=self._penalty_window if window is None else window,
            prompt_ids=request.prompt_ids,
        )

    # ---- inputs ------------------------------------------------------------------------------------------------------

    def _advance(self, steady: _Steady, binding: Binding) -> _Inputs:
        """One position further on the device, without looking at a single request."""
        inputs = steady.inputs
        decode = inputs.decode
        assert decode is not None
        if binding.tables_changed:
            self._fill_tables(binding.rows)
            self._workspace.upload("block_tables_RB", len(binding.rows), decode.block_tables.shape[1])
        inputs.token_ids_T.copy_(steady.token_ids_R)
        inputs.positions_T.add_(1)
        decode.seq_lens.add_(1)
        blocks = decode.block_tables.gather(1, (inputs.positions_T // self._block_size).unsqueeze(1)).squeeze(1)
        inputs.slots_T.copy_(blocks * self._block_size + inputs.positions_T % self._block_size)
        advanced = DecodeDescriptor(decode.block_tables, decode.block_size, decode.seq_lens, decode.max_kv_len + 1)
        return _Inputs(inputs.token_ids_T, inputs.positions_T, inputs.slots_T, advanced, None)

    def _stage(self, batch: SubBatch) -> _Inputs:
        """Write all inputs of a forward pass into the workspace; rows: decodes, then prefill chunks."""
        space, num_decodes = self._workspace, len(batch.decodes)
        token_ids, positions, slots = (space.array(name) for name in ("token_ids_T", "positions_T", "slots_T"))
        chunks = list(batch.chunks)
        tables = self._fill_tables(np.array([chunk.cache.row for chunk in chunks]))
        offset = 0
        for index, chunk in enumerate(chunks):
            stop = offset + chunk.end - chunk.first
            token_ids[offset:stop] = chunk.sequence.tokens(chunk.first, chunk.end)
            place = np.arange(chunk.first, chunk.end)
            positions[offset:stop] = place
            slots[offset:stop] = tables[index, place // self._block_size] * self._block_size + place % self._block_size
            offset = stop
        return _Inputs(
            space.upload("token_ids_T", offset),
            space.upload("positions_T", offset),
            space.upload("slots_T", offset),
            *self._describe(chunks, num_decodes),
        )

    def _describe(
        self, chunks: list[Chunk], num_decodes: int
    ) -> tuple[DecodeDescriptor | None, PrefillDescriptor | None]:
        space, block_size = self._workspace, self._block_size
        decodes, prefills = chunks[:num_decodes], chunks[num_decodes:]
        tables = space.upload("block_tables_RB", len(chunks), space.host.block_tables_RB.shape[1])
        decode = prefill = None
        if decodes:
            space.array("seq_lens_R")[:num_decodes] = [chunk.end for chunk in decodes]
            seq_lens = space.upload("seq_lens_R", num_decodes)
            decode = DecodeDescriptor(tables[:num_decodes], block_size, seq_lens, max(chunk.end for chunk in decodes))
        if prefills:
            lengths = [chunk.end - chunk.first for chunk in prefills]
            space.array("query_starts_R1")[: len(prefills) + 1] = np.cumsum([0, *lengths])
            space.array("start_positions_R")[: len(prefills)] = [chunk.first for chunk in prefills]
            prefill = PrefillDescriptor(
                block_tables=tables[num_decodes:],
                block_size=block_size,
                query_starts=space.upload("query_starts_R1", len(prefills) + 1),
                start_positions=space.upload("start_positions_R", len(prefills)),
                max_query_len=max(lengths),
                max_kv_len=max(chunk.end for chunk in prefills),
            )
        return decode, prefill

    def _fill_tables(self, rows: np.ndarray) -> np.ndarray:
        tables = self._workspace.array("block_tables_RB")[: len(rows)]
        np.take(self._caches.pool.block_tables, rows, axis=0, out=tables)
        return tables

    # ---- forward -----------------------------------------------------------------------------------------------------

    def _attend(self, inputs: _Inputs) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """The decoder's view of the cache: store the new KV, then attend to all that a query may see."""
        attention, layers, decode, prefill = self._attention, self._layers, inputs.decode, inputs.prefill
        num_decodes = decode.seq_lens.shape[0] if decode is not None else 0

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer, kv = layers[index]
            attention.store(k, v, inputs.slots_T, kv)
            if prefill is None or decode is None:
                return attention.forward(q, k, v, decode if prefill is None else prefill, layer, kv)
            n = num_decodes
            first = attention.forward(q[:n], k[:n], v[:n], decode, layer, kv)
            return torch.cat((first, attention.forward(q[n:], k[n:], v[n:], prefill, layer, kv)))

        return attend

    def _draw_logits(self, batch: SubBatch, weights: DecoderWeights, hidden: Tensor) -> Tensor:
        """Logits [R, V] of every row that draws; group members share one row's logits."""
        if not batch.prefills and not any(len(chunk.draws) != 1 for chunk in batch.decodes):
            return self._decoder.logits(weights, hidden)
        last, repeats, offset = [], [], 0
        for chunk in batch.chunks:
            offset += chunk.end - chunk.first
            if chunk.draws:
                last.append(offset - 1)
                repeats.append(len(chunk.draws))
        logits = self._decoder.logits(weights, hidden[torch.tensor(last, device=hidden.device)])
        if max(repeats) == 1:
            return logits
        return logits.repeat_interleave(torch.tensor(repeats, device=hidden.device), dim=0)

    def _score_prompts(self, batch: SubBatch, weights: DecoderWeights, hidden: Tensor) -> Scores:
        """Raw log-probs of the prompt tokens that follow each scoring chunk's positions."""
        scores, offset = [], 0
        for chunk in batch.chunks:
            request = chunk.sequence.request
            if chunk.scores_prompt:
                count = min(chunk.end, len(request.prompt_ids) - 1) - chunk.first
                targets = torch.tensor(
                    request.prompt_ids[chunk.first + 1 : chunk.first + 1 + count], device=hidden.device
                )
                rows = hidden[offset : offset + count]
                scores.append((chunk, *self._score(weights, rows, targets, request.spec.params.prompt_logprobs or 0)))
            offset += chunk.end - chunk.first
        return tuple(scores)

    def _score(
        self, weights: DecoderWeights, hidden: Tensor, targets: Tensor, num_top: int
    ) -> tuple[np.ndarray, list[TopLogprobs]]:
        logprobs: list[Tensor] = []
        top: list[TopLogprobs] = []
        for rows, wanted in zip(hidden.split(_SCORE_ROWS), targets.split(_SCORE_ROWS), strict=True):
            logits = self._decoder.logits(weights, rows)
            logprobs.append(self._sampler.kernels.row_logprobs(logits, wanted))
            if num_top:
                top.extend(self._sampler.top_logprobs(logits, num_top))
        return torch.cat(logprobs).cpu().numpy(), top


def _no_draws(scores: Scores) -> BatchResult:
    empty = np.zeros(0, dtype=np.float32)
    return BatchResult(empty.astype(np.int64), empty, empty, empty, empty.astype(np.uint8), (), scores)


def _to_host(sampled: Sampled, scores: Scores) -> BatchResult:
    return BatchResult(
        token_ids=sampled.token_ids.cpu().numpy(),
        logprobs=sampled.logprobs.cpu().numpy(),
        raw_logprobs=sampled.raw_logprobs.cpu().numpy(),
        log_support_mass=sampled.log_support_mass.cpu().numpy(),
        status=sampled.status.cpu().numpy(),
        top=sampled.top,
        prompt_scores=scores,
    )
