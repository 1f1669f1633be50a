"""A client's pending calls against a simple model: each ends exactly once, and a replay delivers nothing twice."""

from __future__ import annotations

from harness.examples import num_examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from unison.ipc.calls import CallTable
from unison.ipc.errors import UnisonError, WorkerLostError
from unison.ipc.messages import Acknowledged, GetStatus, Ping, RequestFinished, SubmitRequest, TokensGenerated, failure
from unison.ipc.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    RequestOutput,
    SamplingParams,
    TokenDelta,
    VersionSpan,
)  # fmt: skip


def delta(request_id: str, first: int, tokens: tuple[int, ...], version: int) -> TokenDelta:
    floats = tuple(float(token) for token in tokens)
    spans = (VersionSpan(version, first, first + len(tokens)),) if tokens else ()
    return TokenDelta(request_id, 0, first, tokens, floats, floats, floats, spans)


class CallsMachine(RuleBasedStateMachine):
    """P3, R1: random answers, ticks, deaths of workers, welcomes and abandoned calls."""

    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.table = CallTable()
        self.now = 0.0
        self.pending: dict[int, tuple[bool, float | None]] = {}
        self.requests: dict[int, str] = {}
        self.seen: dict[int, list[int]] = {}
        self.has_worker = True

    def take(self, answers: list) -> None:  # type: ignore[type-arg]
        for answer in answers:
            assert answer.call_id in self.pending, "an answer to a call that has ended"
            if answer.is_last:
                del self.pending[answer.call_id]
            else:
                for part in answer.value:
                    assert part.first == len(self.seen[answer.call_id]), "a gap, or tokens twice"
                    self.seen[answer.call_id] += part.token_ids

    @rule(target=calls, resubmit=st.booleans(), deadline_s=st.one_of(st.none(), st.floats(0.1, 5.0)))
    def submit(self, resubmit: bool, deadline_s: float | None) -> int:
        name = f"r{len(self.requests)}"
        request = GenerateRequest(name, (1,), SamplingParams(seed=1))
        call = self.table.open(SubmitRequest(request, True), self.now, deadline_s, resubmit)
        self.pending[call] = (resubmit, None if deadline_s is None else self.now + deadline_s)
        self.requests[call], self.seen[call] = name, []
        return call

    @rule(target=calls)
    def ask(self) -> int:
        call = self.table.open(GetStatus(), self.now, 1.0)
        self.pending[call] = (False, self.now + 1.0)
        return call

    @rule(call=calls, start=st.integers(0, 30), count=st.integers(0, 5), version=st.just(0))
    def tokens(self, call: int, start: int, count: int, version: int) -> None:
        if call not in self.requests:
            return
        start = min(start, len(self.seen[call]))  # what a worker may repeat after a restart
        made = tuple(range(start, start + count))
        self.take(self.table.on_message(0, TokensGenerated((delta(self.requests[call], start, made, version),))))

    @rule(call=calls)
    def other_tokens_than_before(self, call: int) -> None:
        if call in self.pending and self.seen.get(call):
            wrong = delta(self.requests[call], 0, (99,), 0)
            (answer,) = self.table.on_message(0, TokensGenerated((wrong,)))
            assert isinstance(answer.value, WorkerLostError)
            self.take([answer])

    @rule(call=consumes(calls), is_error=st.booleans())
    def finish(self, call: int, is_error: bool) -> None:
        tokens = tuple(self.seen.get(call, []))
        floats = tuple(float(token) for token in tokens)
        done = Completion(0, tokens, floats, floats, floats, FinishReason.LENGTH, (), (), 1)
        output = RequestFinished(RequestOutput(self.requests.get(call, ""), (1,), (done,)))
        message = failure(UnisonError("x")) if is_error else output if call in self.requests else Acknowledged()
        was_pending = call in self.pending
        self.take(self.table.on_message(call, message))
        assert call not in self.pending
        assert was_pending or not self.table.is_pending(call)

    @rule(call=calls)
    def abandon(self, call: int) -> None:
        self.table.abandon(call)
        self.pending.pop(call, None)

    @rule(seconds=st.floats(0.0, 2.0))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        late = {call for call, (_, until) in self.pending.items() if until is not None and self.now >= until}
        self.take(self.table.on_tick(self.now))
        assert not late & self.pending.keys()

    @rule()
    def worker_dies(self) -> None:
        self.take(self.table.on_worker_lost("it died"))
        assert all(resubmit for resubmit, _ in self.pending.values())
        assert self.table.take_outbox() == []

    @rule()
    def next_worker(self) -> None:
        self.table.on_welcome()
        assert sorted(call for call, _ in self.table.take_outbox()) == sorted(self.pending)

    @rule()
    def stray_answers(self) -> None:
        assert self.table.on_message(10**9, Acknowledged()) == []
        assert self.table.on_message(0, Ping()) == []

    @invariant()
    def table_and_model_agree(self) -> None:
        assert self.table.num_pending == len(self.pending)

    def teardown(self) -> None:
        self.take(self.table.close(UnisonError("closed")))
        assert not self.pending and self.table.num_pending == 0


TestCalls = CallsMachine.TestCase
TestCalls.settings = settings(max_examples=num_examples(100), stateful_step_count=40, deadline=None)
