"""RequestCaches under any order of operations, against a plain model of who holds which tokens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from unison.engine.cache.pool import KVPool
from unison.engine.cache.requests import RequestCaches
from unison.engine.cache.strategy import PagedStrategy, RequestCache

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class CacheMachine(RuleBasedStateMachine):
    """`written[block][offset]` is what a real buffer would hold: (version, the exact tokens up to there)."""

    num_rules = 0

    @initialize(block_size=st.integers(1, 4), num_blocks=st.integers(4, 12))
    def build(self, block_size: int, num_blocks: int) -> None:
        self.size = block_size
        self.own = RequestCaches(KVPool(PagedStrategy(num_blocks, block_size), 4, num_blocks))
        self.written: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.open: list[tuple[RequestCache, list[int]]] = []
        self.version = 0

    @rule(tokens=TOKENS, reuse=st.booleans())
    def open_one(self, tokens: list[int], reuse: bool) -> None:
        cache = self.own.try_open(tokens, self.version, reuse)
        if cache is None:
            assert len(self.open) == 4
            return
        assert cache.num_tokens < len(tokens) and cache.num_tokens % self.size == 0
        assert not cache.num_tokens or reuse
        self.open.append((cache, tokens))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), count=st.integers(1, 5))
    def extend(self, data: st.DataObject, count: int) -> None:
        cache, tokens = data.draw(st.sampled_from(self.open))
        tokens.extend(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
        end = min(len(tokens), cache.num_tokens + count)
        before = list(cache.blocks), self.own.pool.num_free
        copies = self.own.try_extend(cache, end)
        if copies is None:
            assert (list(cache.blocks), self.own.pool.num_free) == before
            return
        for copy in copies:
            for offset in range(self.size):
                if (copy.src, offset) in self.written:
                    self.written[copy.dst, offset] = self.written[copy.src, offset]
        for position in range(cache.num_tokens, end):
            block = cache.blocks[position // self.size]
            assert self.own.pool.refcount(block) == 1
            self.written[block, position % self.size] = (self.version, tuple(tokens[: position + 1]))
        self.own.commit(cache, end, self.version)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        cache, tokens = data.draw(st.sampled_from(self.open))
        self.own.publish(cache, tokens)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        cache, tokens = data.draw(st.sampled_from(self.open))
        fork = self.own.try_fork(cache)
        if fork is not None:
            self.open.append((fork, list(tokens)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.open))
        self.open = [other for other in self.open if other is not entry]
        self.own.close(entry[0])

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        free = self.own.pool.num_free
        assert self.own.index.evict(count) == self.own.pool.num_free - free

    @rule(step=st.integers(0, 1))
    def new_version(self, step: int) -> None:
        """`step` 0 goes back to the version before, as a rollback does."""
        self.version = self.version + 1 if step else max(0, self.version - 1)

    @rule(back=st.integers(0, 2))
    def forget(self, back: int) -> None:
        self.own.forget_version(self.version - back)

    @invariant()
    def holds(self) -> None:
        CacheMachine.num_rules += 1
        if not hasattr(self, "own"):
            return
        self.own.check_invariants()
        for cache, tokens in self.open:
            for span in cache.kv_spans:
                for position in range(span.first, span.end):
                    version, prefix = self.written[cache.blocks[position // self.size], position % self.size]
                    assert (version, prefix) == (span.version, tuple(tokens[: position + 1]))

    def teardown(self) -> None:
        if not hasattr(self, "own"):
            return
        for cache, _ in self.open:
            self.own.close(cache)
        for version in range(200):
            self.own.forget_version(version)
        self.own.check_invariants()
        assert self.own.pool.num_free == self.own.pool.strategy.num_blocks


def test_any_order() -> None:
    """V3, V4, R2, S29, P01, P03: a short exploration for every run."""
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=20, stateful_step_count=40))


@pytest.mark.slow
def test_ten_thousand_operations() -> None:
    """V3, V4, R2, S29, P01, P03: ten thousand operations; each position always holds what its cache says."""
    before = CacheMachine.num_rules
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=300, stateful_step_count=60))
    assert CacheMachine.num_rules - before >= 10_000
