"""Engine: one model, one device, one process; generates, scores, and changes its policy between two steps.

Owns: the composition of guard, scheduler, executor and metrics, and the edge where requests are checked. Knows no
socket, no process and no text: token ids in, token ids out. Used alone (`run_batch`), or stepped in a loop by a worker.

Threads: `submit`, `abort` and `step` belong to one thread. `run_batch`, `score` and `install` may be called from
another: the guard makes them exclude each other and every step.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from ..ipc.errors import BatchFailedError, DigestMismatchError, InvalidRequestError, InvariantError
from ..ipc.types import (
    MAX_SEED,
    ErrorReason,
    FinishReason,
    GenerateRequest,
    Manifest,
    PolicyVersion,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    TokenDelta,
)
from .assembly import EngineParts, assemble
from .config import EngineConfig
from .guard import InstalledVersion
from .metrics import EngineStats
from .models.layout import DecoderWeights, WeightLayout
from .models.loader import load
from .models.spec import ModelSpec
from .outcome import StepEvents
from .request import Request
from .status import EngineStatus, status_of
from .validation import validate


@dataclass(frozen=True)
class StepOutput:
    """What one step gave to the outside."""

    deltas: tuple[TokenDelta, ...]
    """New tokens and terminal events, per sequence."""
    finished: tuple[RequestOutput, ...]
    """Requests whose last completion ended in this step."""


class Engine:
    """A generation engine.

    Life: built with weights (version 0, or the version given) → any number of requests and installs → dropped.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        config: EngineConfig | None = None,
        ordinal: int = 0,
        highest_ordinal: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Run straight off `weights` (Hugging Face names → tensors in one `WeightLayout`), without copying them.

        They are version `ordinal`; `highest_ordinal` is what an engine before this one had come to, so that ordinals
        only grow over its death too (V1).

        Raises:
            WeightsError: a tensor is missing, unexpected, misshapen, or outside the flat layout.
            ConfigError: the configuration doesn't fit the model or the machine.
        """
        self.config = config or EngineConfig()
        self.spec = spec
        self._clock = clock
        self._parts: EngineParts = assemble(spec, weights, self.config, (ordinal, highest_ordinal))
        self._num_requests = 0
        self._num_preemptions = 0
        self._kept: list[StepOutput] = []

    @classmethod
    def from_pretrained(cls, directory: str | Path, config: EngineConfig | None = None) -> Engine:
        """Build from a Hugging Face directory (config.json and safetensors)."""
        config = config or EngineConfig()
        spec = ModelSpec.from_dir(Path(directory))
        layout = WeightLayout(spec, getattr(torch, config.dtype))
        return cls(spec, load(Path(directory), layout, torch.device(config.device)), config)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        """Accept a request; from here on it ends in exactly one terminal event per completion (R1).

        Raises:
            InvalidRequestError: a field doesn't fit this model or pool, or the id is in flight; nothing was allocated
            (R2). CapacityError: the queue is full.
            UnknownVersionError: `pin_version` isn't installed.
        """
        parts = self._parts
        validate(request, parts.limits)
        if parts.scheduler.knows(request.request_id):
            raise InvalidRequestError("request_id", f"{request.request_id!r} is in flight already; ids are unique")
        params = request.params
        seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed
        eos_ids = () if params.ignore_eos else self.spec.eos_token_ids
        stop_ids = frozenset((*eos_ids, *params.stop_token_ids))
        self._num_requests += 1
        parts.scheduler.submit(Request(request, self._num_requests, seed, stop_ids))
        parts.metrics.on_submit(request.request_id, self._clock())

    def abort(self, request_id: str, reason: ErrorReason = ErrorReason.CANCELLED) -> bool:
        """Cancel what isn't finished; the terminal events come with the next step (or `take_events`). False where the
        id isn't in flight."""
        return self._parts.scheduler.abort(request_id, reason)

    @property
    def has_work(self) -> bool:
        """True while `step` has something to run or to report."""
        return self._parts.scheduler.has_work or bool(self._kept)

    def step(self) -> StepOutput:
        """Advance by one step: at most one token per running sequence, and a share of the waiting prompts."""
        return self._with_kept(self._advance())

    def take_events(self) -> StepOutput:
        """What is there to report without running anything: terminal events of requests that were aborted."""
        return self._with_kept(self._pending_events())

    def run_batch(
        self,
        prompts: Seq[Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        n: int = 1,
        pin_version: int | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt `n` times under one policy version; updates wait until the batch is done (S26).

        A batch larger than the pool runs in waves. Outputs come in the order of `prompts`.

        Raises:
            InvalidRequestError: a prompt or its parameters can't be served; nothing of the batch has run.
            BatchFailedError: some completions ended in an error; carries prompt indices and reasons (S28).
        """
        requests = self._batch_requests(prompts, params, n, pin_version)
        for request in requests:
            validate(request, self._parts.limits)
        with self._parts.guard.hold_generation():
            outputs = self._run(requests)
        failures = {
            index: completion.error.value
            for index, output in reversed(list(enumerate(outputs)))
            for completion in output.completions
            if completion.finish_reason is FinishReason.ERROR and completion.error is not None
        }
        if failures:
            raise BatchFailedError(f"{len(failures)} of {len(outputs)} prompts failed: {failures}", failures)
        return outputs

    def score(
        self, prompt: Seq[int], continuation: Seq[int], top_k: int = 0, pin_version: int | None = None
    ) -> ScoreOutput:
        """Raw log-probs of `continuation` given `prompt`, teacher-forced through the same forward as generation.

        Raises:
            InvalidRequestError: the prompt or the continuation is empty, or both don't fit the context.
        """
        if not prompt or not continuation:
            raise InvalidRequestError(
                "continuation" if prompt else "prompt_ids", "is empty; scoring needs at least one token"
            )
        params = SamplingParams(max_tokens=0, prompt_logprobs=top_k, seed=0)
        with self._parts.guard.hold_generation():
            self._parts.stepper.flip()
            version = self.live_version.ordinal if pin_version is None else pin_version
            (output,) = self.run_batch([[*prompt, *continuation]], params, pin_version=version)
        first = len(prompt) - 1
        if output.prompt_logprobs is None:
            raise InvariantError("a scoring request came back without prompt log-probs")
        return ScoreOutput(output.prompt_logprobs[first:], (output.prompt_top_logprobs or ())[first:], version)

    # ---- policy versions ---------------------------------------------------------------------------------------------

    @property
    def live_version(self) -> PolicyVersion:
        """The version that new requests start on."""
        return self._parts.guard.live

    @property
    def versions(self) -> tuple[InstalledVersion, ...]:
        """Every installed version with its state and pins."""
        return self._parts.guard.installed

    def install(
        self, weights: Mapping[str, Tensor], ordinal: int | None = None, expected: Manifest | str | None = None
    ) -> PolicyVersion:
        """Make `weights` the next live version; it goes live before the next step, without a copy and without a pause.

        The tensors must stay unwritten until the version is retired. `ordinal` defaults to one above the highest seen.
        `expected` is what the publisher says of them, a manifest or its root digest; the bytes are hashed here anyway.

        Raises:
            StaleVersionError, DigestMismatchError, WeightsError, VersionBusyError: nothing has changed (V5).
        """
        parts = self._parts
        bound = parts.layout.bind(weights)
        manifest = parts.layout.manifest(weights)
        digest = expected.digest if isinstance(expected, Manifest) else expected
        differing = manifest.differing(expected) if isinstance(expected, Manifest) else ()
        version = PolicyVersion(parts.guard.next_ordinal if ordinal is None else ordinal, digest or manifest.digest)

        def verify(_: DecoderWeights) -> None:
            if manifest.digest != version.digest:
                raise DigestMismatchError(
                    f"version {version.ordinal} was announced with digest {version.digest}, its tensors have "
                    f"{manifest.digest}; publish again from intact tensors (differing: "
                    f"{', '.join(differing[:4]) or 'unknown'}{' …' if len(differing) > 4 else ''})",
                    differing,
                )

        parts.guard.install(version, bound, verify)
        return version

    def rollback(self, ordinal: int) -> None:
        """Go back to an installed version before the next step.

        Raises:
            UnknownVersionError: it isn't installed any more.
        """
        self._parts.guard.rollback(ordinal)

    def pin(self, ordinal: int) -> None:
        """Keep an installed version until `unpin`, whoever else lets go of it; pins are counted.

        Raises:
            UnknownVersionError: it isn't installed (any more).
        """
        self._parts.guard.pin(ordinal)

    def unpin(self, ordinal: int) -> None:
        """Give one pin back.

        Raises:
            InvariantError: there is none to give back.
        """
        self._parts.guard.unpin(ordinal)

    def retire(self, ordinal: int) -> None:
        """Give up a version that is kept for rollback only; its weights aren't read after the next step or flip.

        Raises:
            UnknownVersionError: it isn't installed. VersionBusyError: it is live, pending or pinned.
        """
        self._parts.guard.retire(ordinal)

    @property
    def next_ordinal(self) -> int:
        """The lowest ordinal that `install` accepts."""
        return self._parts.guard.next_ordinal

    def flip(self) -> bool:
        """Make a pending version live now, between two steps; True where the live version changed."""
        with self._parts.guard.hold_generation():
            return self._parts.stepper.flip()

    def stats(self) -> EngineStats:
        """Counters and percentiles since the engine was built."""
        return self._parts.metrics.snapshot()

    def status(self) -> EngineStatus:
        """Gauges, versions, which kernels compute, and whether this machine keeps the promise of exactness."""
        return status_of(self._parts)

    def check_invariants(self) -> None:
        """Raise InvariantError where a promise of scheduler, caches or guard is broken; for tests, after every step."""
        self._parts.scheduler.check_invariants()
        self._parts.guard.check_invariants()

    def warm_up(self) -> None:
        """Run one short prompt so that the first request doesn't pay for first touches and captures (S9)."""
        length = min(self.config.runtime.prefill_warmup_tokens, self._parts.limits.max_len - 2)
        if length > 0:
            self.run_batch([[0] * length], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _advance(self) -> StepOutput:
        parts = self._parts
        started_s = self._clock()
        try:
            with parts.guard.hold_generation():
                events = parts.stepper.advance()
        finally:
            preempted, self._num_preemptions = self._num_preemptions, parts.scheduler.num_preemptions
            parts.metrics.on_preempt(self._num_preemptions - preempted)
        self._measure(events, started_s, self._clock())
        return StepOutput(events.deltas(), events.outputs())

    def _measure(self, events: StepEvents, started_s: float, now_s: float) -> None:
        metrics, plan = self._parts.metrics, self._parts.stepper.last_plan
        if plan.batches:
            num_decodes = sum(len(batch.decodes) for batch in plan.batches)
            metrics.on_step(
                num_decodes, sum(batch.num_tokens for batch in plan.batches) - num_decodes, now_s - started_s
            )
        for seq, first in events.pending:
            if first == 0 and seq.generated:
                metrics.on_first_token(seq.request.request_id, seq.index, now_s)
            if seq.finish_reason is not None:
                metrics.on_finish(seq.request.request_id, seq.index, seq.finish_reason, len(seq.generated), now_s)
        for request in events.finished:
            metrics.on_prefix_hit(request.num_cached_tokens)
            metrics.forget(request.request_id)

    def _batch_requests(
        self, prompts: Seq[Seq[int]], params: SamplingParams | Seq[SamplingParams] | None, n: int, pin: int | None
    ) -> list[GenerateRequest]:
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Seq) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequestError(
                "params", f"has {len(each)} entries for {len(prompts)} prompts; give one each, or one for all"
            )
        batch = secrets.token_hex(8)
        return [
            GenerateRequest(f"batch-{batch}-{index}", tuple(prompt), own, n, pin_version=pin)
            for index, (prompt, own) in enumerate(zip(prompts, each, strict=True))
        ]

    def _run(self, requests: list[GenerateRequest]) -> list[RequestOutput]:
        """Submit, step until all are done, and leave nothing behind, whatever happens."""
        wanted = {request.request_id for request in requests}
        done: dict[str, RequestOutput] = {}
        try:
            for request in requests:
                self.submit(request)
            while len(done) < len(requests):
                done.update(self._take(self._advance(), wanted))
                if not self._parts.stepper.last_plan.batches and len(done) < len(requests):
                    raise InvariantError(f"{len(requests) - len(done)} requests wait, but no step can run")
        finally:
            if len(done) < len(requests):
                for request_id in wanted - set(done):
                    self.abort(request_id)
                self._take(self._pending_events(), wanted)
        return [done[request.request_id] for request in requests]

    def _with_kept(self, last: StepOutput) -> StepOutput:
        kept, self._kept = self._kept, []
        outputs = [*kept, last]
        return StepOutput(
            tuple(delta for output in outputs for delta in output.deltas),
            tuple(done for output in outputs for done in output.finished),
        )

    def _pending_events(self) -> StepOutput:
        events = self._parts.scheduler.take_events()
        now_s = self._clock()
        self._parts.stepper.clear_plan()
        self._measure(events, now_s, now_s)
        return StepOutput(events.deltas(), events.outputs())

    def _take(self, output: StepOutput, wanted: set[str]) -> dict[str, RequestOutput]:
        """The batch's own finished requests; what belongs to other requests is kept for the next `step`."""
        others = StepOutput(
            tuple(delta for delta in output.deltas if delta.request_id not in wanted),
            tuple(done for done in output.finished if done.request_id not in wanted),
        )
        if others.deltas or others.finished:
            self._kept.append(others)
        return {done.request_id: done for done in output.finished if done.request_id in wanted}
