"""Scheduler: who runs in the next step, on which positions, under which version; and what a step's result means.

Owns: the queue, the running sequences, their KV (through RequestCaches) and their pins on the guard. Knows nothing of
tensors, models, clocks or threads. The whole contract with the step is two calls: `plan()` and `apply(plan, result)`;
all else is `submit`, `abort`, `on_flip` and `fail`. Called by the engine, in the thread that steps it.

Order of service: by arrival. Running sequences come first (each decode costs one token of the step's budget), then
prefill chunks of those still in their prompt, then admissions. When KV is short the youngest running sequence is
preempted: it gives up its KV and computes it again later, which changes no output (R3).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterable

from ..ipc.errors import CapacityError, InvariantError
from ..ipc.types import ErrorReason, FinishReason, OnUpdate
from .cache.requests import RequestCaches
from .cache.strategy import BlockCopy, RequestCache
from .config import SchedulerConfig
from .guard import Flip, PolicyVersionGuard
from .outcome import StepEvents, absorb
from .plan import Chunk, StepPlan, StepResult, by_version
from .request import Request, Sequence, SequenceStatus

_ADMISSION_LOOKAHEAD = 64
"""Waiting sequences that one step looks at before it gives up finding one that fits."""


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.request.arrival, seq.index


class Scheduler:
    """Continuous batching over a paged KV pool.

    Invariants: a sequence is in exactly one of `waiting`, `running` or finished; running ones hold a row and KV, others
    hold nothing; each started or pinned request holds exactly one pin; `check_invariants` verifies it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        caches: RequestCaches,
        guard: PolicyVersionGuard,
        prefix_caching: bool,
        max_len: int,
    ) -> None:
        self._config = config
        self._caches = caches
        self._guard = guard
        self._prefix_caching = prefix_caching
        self._max_len = max_len
        self._watermark_blocks = int(config.watermark_fraction * caches.pool.strategy.num_blocks)
        self._requests: dict[str, Request] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._events = StepEvents()
        self._copies: list[BlockCopy] = []
        self._reserved_rows = 0
        self._has_stale = False
        self.num_preemptions = 0

    # ---- what the outside asks -------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Sequences without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with a row."""
        return len(self._running)

    @property
    def num_requests(self) -> int:
        """Requests that aren't done."""
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        """True while a request isn't done or an event hasn't been taken."""
        return bool(self._requests) or bool(self._events)

    def knows(self, request_id: str) -> bool:
        """True while a request with this id is in flight."""
        return request_id in self._requests

    def submit(self, request: Request) -> None:
        """Queue a validated request; takes a pin where it names a version.

        Raises:
            CapacityError: the queue is full.
            InvariantError: the id is already in flight (the engine's edge refuses that).
            UnknownVersionError: the pinned version isn't installed.
        """
        if request.request_id in self._requests:
            raise InvariantError(f"request id {request.request_id!r} is in flight already")
        limit = self._config.max_waiting
        # Counted only where the limit can be reached at all.
        if len(self._requests) >= limit and sum(not known.has_started for known in self._requests.values()) >= limit:
            raise CapacityError(f"{limit} requests wait, the limit is scheduler.max_waiting; try again later")
        if request.version is not None:
            self._guard.pin(request.version)
        self._requests[request.request_id] = request
        self._waiting.extend(request.sequences)

    def abort(self, request_id: str, reason: ErrorReason = ErrorReason.CANCELLED) -> bool:
        """End what isn't finished of a request; False where there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        for seq in request.sequences:
            self._finish(seq, FinishReason.ABORTED, error=reason)
        return True

    def on_flip(self, flip: Flip) -> None:
        """A new version went live: each started request follows its own rule (DESIGN: life of a weight update)."""
        self._caches.unbind()
        for request in list(self._requests.values()):
            if not request.has_started or request.spec.pin_version is not None:
                continue
            if request.spec.on_update is OnUpdate.FINISH or request.version == flip.new.ordinal:
                continue
            if request.spec.on_update is OnUpdate.ABORT:
                self.abort(request.request_id, ErrorReason.POLICY_UPDATED)
                continue
            if request.spec.on_update is OnUpdate.RECOMPUTE:
                self._has_stale = True
                continue
            self._move_pin(request, flip.new.ordinal)

    def forget_version(self, ordinal: int) -> None:
        """Its weights are gone: its prefix blocks serve nobody any more."""
        self._caches.forget_version(ordinal)

    def fail(self, plan: StepPlan, reason: ErrorReason) -> None:
        """The step broke: end every sequence that was in it; all others go on (R2)."""
        self._caches.unbind()
        for batch in plan.batches:
            for chunk in batch.chunks:
                for seq in (chunk.sequence, *chunk.forks):
                    self._finish(seq, FinishReason.ERROR, error=reason)

    # ---- plan --------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """What to run now; empty when nothing can. Extends KV for exactly the positions it names."""
        self._copies = []
        self._reserved_rows = 0
        self._renew()
        chunks: list[Chunk] = []
        budget = self._config.max_step_tokens - self._plan_decodes(chunks)
        budget = self._plan_prefills(chunks, budget)
        # A later extension may have preempted a sequence that was planned before it; admission may start it anew.
        chunks = _still_running(chunks)
        self._admit(chunks, budget)
        return StepPlan(by_version(_still_running(chunks)), tuple(self._copies))

    def _renew(self) -> None:
        """Requests under `recompute` move to the live version, oldest first: at least one, and no more than a prefill
        chunk's tokens per step, so that the others go on under the old version until it is their turn."""
        if not self._has_stale:
            return
        live, budget = self._guard.live.ordinal, self._config.prefill_chunk_tokens
        for request in self._requests.values():
            if request.spec.on_update is not OnUpdate.RECOMPUTE or request.spec.pin_version is not None:
                continue
            if not request.has_started or request.version == live:
                continue
            if budget <= 0:
                return
            for seq in request.sequences:
                if seq.status is SequenceStatus.RUNNING:
                    budget -= seq.num_tokens
                    self._preempt(seq)
            self._move_pin(request, live)
        self._has_stale = False

    def _plan_decodes(self, chunks: list[Chunk]) -> int:
        """One token for each running sequence that is through its prompt; returns the tokens used."""
        used = 0
        for seq in list(self._running):
            if seq.status is not SequenceStatus.RUNNING:
                continue
            first, end = seq.num_computed, seq.num_tokens
            if end - first == 1 and self._extend(seq, end):
                chunks.append(Chunk(seq, first, end, self._forks(seq, end)))
                used += 1
        return used

    def _plan_prefills(self, chunks: list[Chunk], budget: int) -> int:
        """Next chunks of the running sequences that are still in their prompt (or in recomputation)."""
        planned = {id(chunk.sequence) for chunk in chunks}
        for seq in list(self._running):
            if budget <= 0:
                break
            if (
                seq.status is SequenceStatus.RUNNING
                and id(seq) not in planned
                and seq.num_tokens - seq.num_computed > 1
            ):
                budget -= self._plan_chunk(seq, chunks, budget)
        return budget

    def _plan_chunk(self, seq: Sequence, chunks: list[Chunk], budget: int) -> int:
        """The next chunk of one prompt; returns the tokens used (0: no room now)."""
        first = seq.num_computed
        end = min(seq.num_tokens, first + min(budget, self._config.prefill_chunk_tokens))
        if not self._extend(seq, end):
            return 0
        chunks.append(Chunk(seq, first, end, self._forks(seq, end)))
        return end - first

    def _forks(self, seq: Sequence, end: int) -> tuple[Sequence, ...]:
        """Waiting members of the group that can share this prompt's KV, as many as rows are free."""
        request = seq.request
        if request.spec.n == 1 or seq.generated or end != seq.num_tokens or not self._caches.pool.strategy.can_share:
            return ()
        members = [
            other for other in request.sequences if other.status is SequenceStatus.WAITING and not other.generated
        ]
        forks = members[: self._num_free_rows]
        self._reserved_rows += len(forks)
        return tuple(forks)

    @property
    def _num_free_rows(self) -> int:
        """Rows that neither a sequence holds nor a fork of this step is promised."""
        return self._caches.pool.rows.num_free - self._reserved_rows

    def _extend(self, seq: Sequence, end: int) -> bool:
        """Room for positions up to `end`, preempting the youngest while it is younger than `seq`.

        When `seq` itself is the youngest it steps back. Alone and still without room, it can never go on: it ends.
        """
        while True:
            assert seq.cache is not None
            copies = self._caches.try_extend(seq.cache, end)
            if copies is not None:
                self._copies.extend(copies)
                return True
            youngest = self._running[-1]
            if youngest is not seq:
                self._preempt(youngest)
            elif len(self._running) > 1:
                self._preempt(seq)
                return False
            else:
                self._finish(seq, FinishReason.ERROR, error=ErrorReason.KV_EXHAUSTED)
                return False

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Start waiting sequences by arrival. One that doesn't fit may be overtaken, but not for ever."""
        forked = {id(seq) for chunk in chunks for seq in chunk.forks}
        prefilling = {seq.request.request_id for seq in self._running if seq.num_computed < len(seq.request.prompt_ids)}
        bypassed: list[Request] = []
        overtaken: list[Request] = []
        for seq in self._waiting[:_ADMISSION_LOOKAHEAD]:
            if budget <= 0 or self._num_free_rows <= 0:
                break
            request = seq.request
            if id(seq) in forked or (request.request_id in prefilling and self._caches.pool.strategy.can_share):
                continue
            used = self._start(seq, chunks, budget) if self._has_room(seq) else 0
            if used:
                budget -= used
                forked.update(id(fork) for fork in chunks[-1].forks)
                prefilling.add(request.request_id)
                overtaken = list(bypassed)
            elif request.num_bypassed_steps >= self._config.max_bypass_steps:
                break
            else:
                bypassed.append(request)
        for request in overtaken:
            request.num_bypassed_steps += 1

    def _has_room(self, seq: Sequence) -> bool:
        """Blocks for its tokens and one for each fork's tail, above the watermark; alone, it always may try."""
        if not self._running:
            return True
        request = seq.request
        need = self._caches.blocks_needed(None, seq.num_tokens) + (request.spec.n - 1 if not seq.generated else 0)
        total = self._caches.pool.strategy.num_blocks
        return self._caches.num_free_blocks >= min(need + self._watermark_blocks, total)

    def _start(self, seq: Sequence, chunks: list[Chunk], budget: int) -> int:
        """WAITING → RUNNING: binds the request to a version, opens its KV, plans its first chunk."""
        request = seq.request
        version = self._guard.live.ordinal if request.version is None else request.version
        reuse = self._prefix_caching and not request.needs_prompt_scores
        cache = self._caches.try_open(seq.tokens(0, seq.num_tokens), version, reuse)
        if cache is None:
            return 0
        if request.version is None:
            self._guard.pin(version)
            request.version = version
        if not request.has_started:
            request.num_cached_tokens = cache.num_tokens
        self._run(seq, cache)
        used = self._plan_chunk(seq, chunks, budget)
        if not used and seq.status is SequenceStatus.RUNNING:
            self._preempt(seq)
        return used

    # ---- apply -------------------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, result: StepResult) -> StepEvents:
        """Take a step's result: commit KV, append tokens, fork groups, finish; returns all events since the last
        call."""
        for batch, rows in zip(plan.batches, result.batches, strict=True):
            for chunk in batch.chunks:
                self._commit(chunk, batch.version)
            for seq, first, outcome in absorb(batch, rows, self._max_len):
                if outcome is None:
                    self._events.add_delta(seq, first)
                else:
                    self._finish(seq, outcome.finish_reason, outcome.error, outcome.matched_stop, first)
        return self.take_events()

    def take_events(self) -> StepEvents:
        """Events since the last call."""
        events, self._events = self._events, StepEvents()
        return events

    def _commit(self, chunk: Chunk, version: int) -> None:
        cache = chunk.cache
        self._caches.commit(cache, chunk.end, version)
        if self._prefix_caching:
            self._publish(chunk.sequence)
        for seq in chunk.forks:
            fork = self._caches.try_fork(cache)
            if fork is None:
                raise InvariantError("a planned fork found no row")
            self._run(seq, fork)

    def _run(self, seq: Sequence, cache: RequestCache) -> None:
        self._waiting.remove(seq)
        seq.start(cache)
        insort(self._running, seq, key=_order)

    def _publish(self, seq: Sequence) -> None:
        """Offer the whole blocks computed so far to the prefix index, once per block."""
        cache = seq.cache
        assert cache is not None
        if cache.num_tokens // self._caches.pool.strategy.block_size > cache.num_published_blocks:
            self._caches.publish(cache, seq.tokens(0, cache.num_tokens))

    # ---- leaving -----------------------------------------------------------------------------------------------------

    def _preempt(self, seq: Sequence) -> None:
        """Give up the KV; computed again later from prompt and tokens so far (R3)."""
        self._release(seq, SequenceStatus.WAITING)
        insort(self._waiting, seq, key=_order)
        self.num_preemptions += 1

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        error: ErrorReason | None = None,
        matched_stop: int | None = None,
        first: int | None = None,
    ) -> None:
        """Any → FINISHED with its one terminal event (R1); releases row, KV and, with the last one, the pin (R2)."""
        if seq.status is SequenceStatus.FINISHED:
            return
        if seq.status is SequenceStatus.RUNNING:
            self._release(seq, SequenceStatus.FINISHED)
        else:
            self._waiting.remove(seq)
            seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.error, seq.matched_stop = reason, error, matched_stop
        self._events.add_delta(seq, len(seq.generated) if first is None else first)
        request = seq.request
        if request.is_done:
            del self._requests[request.request_id]
            if request.version is not None:
                self._guard.unpin(request.version)
            self._events.finished.append(request)

    def _release(self, seq: Sequence, status: SequenceStatus) -> None:
        """RUNNING → `status`: give back row and KV."""
        self._running.remove(seq)
        cache = seq.leave(status)
        self._drop_copies_into(cache)
        self._caches.close(cache)

    def _drop_copies_into(self, cache: RequestCache) -> None:
        """A sequence that leaves while a step is being planned takes its copy-on-write copies with it."""
        if not self._copies:
            return
        blocks = set(cache.blocks)
        self._copies = [copy for copy in self._copies if copy.dst not in blocks]

    def _move_pin(self, request: Request, ordinal: int) -> None:
        self._guard.pin(ordinal)
        assert request.version is not None
        self._guard.unpin(request.version)
        request.version = ordinal

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise InvariantError where a promise of this class is broken; for tests, after every operation."""
        waiting, running = {id(seq) for seq in self._waiting}, {id(seq) for seq in self._running}
        _require(
            len(waiting) == len(self._waiting) and len(running) == len(self._running), "a sequence is listed twice"
        )
        _require(not waiting & running, "a sequence waits and runs")
        _require(self._waiting == sorted(self._waiting, key=_order), "the queue is out of order")
        for request in self._requests.values():
            _require(not request.is_done, f"{request.request_id} is done but still known")
            for seq in request.sequences:
                is_running = seq.status is SequenceStatus.RUNNING
                _require(
                    is_running == (id(seq) in running) == (seq.cache is not None), f"{seq.identity} has a wrong status"
                )
                _require((seq.status is SequenceStatus.WAITING) == (id(seq) in waiting), f"{seq.identity} is lost")
        self._caches.check_invariants()
        _check_pins(self._guard, self._requests.values())


def _still_running(chunks: Iterable[Chunk]) -> list[Chunk]:
    return [chunk for chunk in chunks if chunk.sequence.status is SequenceStatus.RUNNING]


def _require(holds: Hashable, message: str) -> None:
    if not holds:
        raise InvariantError(message)


def _check_pins(guard: PolicyVersionGuard, requests: Iterable[Request]) -> None:
    """Every version that a request runs on, or has pinned, is installed and pinned at least as often."""
    wanted: dict[int, int] = {}
    for request in requests:
        if request.version is not None:
            wanted[request.version] = wanted.get(request.version, 0) + 1
    pins = {installed.version.ordinal: installed.num_pins for installed in guard.installed}
    for ordinal, count in wanted.items():
        _require(
            pins.get(ordinal, 0) >= count, f"version {ordinal} has {pins.get(ordinal)} pins, {count} requests run on it"
        )
