"""Buffer, strategies, pool, prefix index and the requests' caches, each alone."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest
import torch
from unison.engine.cache import buffer, pool, prefix, requests, strategy
from unison.engine.cache.buffer import KVBuffer
from unison.engine.cache.pool import KVPool, RowPool
from unison.engine.cache.prefix import PrefixIndex
from unison.engine.cache.requests import RequestCaches
from unison.engine.cache.sizing import pool_tokens
from unison.engine.cache.strategy import AllocationStrategy, BlockCopy, ContiguousStrategy, PagedStrategy
from unison.engine.config import CacheConfig, SchedulerConfig
from unison.ipc.errors import CapacityError, ConfigError, InvariantError
from unison.ipc.types import VersionSpan

CPU = torch.device("cpu")


def caches(num_blocks: int = 16, block_size: int = 4, num_rows: int = 4) -> RequestCaches:
    return RequestCaches(KVPool(PagedStrategy(num_blocks, block_size), num_rows, num_blocks))


def grow(own: RequestCaches, cache: strategy.RequestCache, num_tokens: int, version: int = 0) -> tuple[BlockCopy, ...]:
    copies = own.try_extend(cache, num_tokens)
    assert copies is not None
    own.commit(cache, num_tokens, version)
    own.check_invariants()
    return copies


# ---- strategies and buffer


class Half(AllocationStrategy):
    """Lacks blocks_for and can_share."""

    @property
    def num_blocks(self) -> int:
        return 1

    @property
    def block_size(self) -> int:
        return 1


@pytest.mark.parametrize("kind", [AllocationStrategy, Half])
def test_strategy_is_abstract(kind: type[AllocationStrategy]) -> None:
    """S18: neither the base nor a subclass that lacks an operation can be built."""
    with pytest.raises(TypeError, match="abstract"):
        kind()


def test_strategies_count_blocks() -> None:
    """S18: paged cuts small blocks, contiguous one run per sequence."""
    paged, contiguous = PagedStrategy(10, 4), ContiguousStrategy(3, 64)
    assert [paged.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [contiguous.blocks_for(n) for n in (1, 64, 65)] == [1, 1, 2]
    assert (paged.can_share, contiguous.can_share) == (True, False)
    assert (contiguous.num_blocks, contiguous.block_size) == (3, 64)


def test_type_hints_resolve() -> None:
    """S19: state of a request is defined in the strategy layer, and no annotation refers to what isn't there."""
    assert strategy.RequestCache.__module__.endswith("cache.strategy")
    for module in (buffer, strategy, pool, prefix, requests):
        own = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__]
        assert own
        for kind in own:
            get_type_hints(kind)
            for _, function in inspect.getmembers(kind, inspect.isfunction):
                get_type_hints(function)


def test_buffer_is_made_of_ordinary_tensors() -> None:
    """S12, S13: also inside inference mode; tables are int32; a pool beyond int32 is refused before it is allocated."""
    with torch.inference_mode():
        own = KVBuffer(2, 8, 2, 4, torch.bfloat16, CPU)
    keys, values = own.layer(1)
    assert not keys.is_inference() and not values.is_inference()
    assert keys.shape == values.shape == (8, 2, 4)
    assert caches().pool.block_tables.dtype == "int32"
    with pytest.raises(ConfigError, match="int32"):
        KVBuffer(1, 2**31, 1, 8, torch.bfloat16, CPU)


def test_copy_blocks_reads_before_it_writes() -> None:
    """R3: a swap by copies, in all layers, for keys and values."""
    own = KVBuffer(2, 8, 1, 2, torch.float32, CPU)
    for index in range(2):
        for tensor in own.layer(index):
            tensor.copy_(torch.arange(8.0)[:, None, None].expand(8, 1, 2) + 100 * index)
    own.copy_blocks([(0, 1), (1, 0)], 4)
    for index in range(2):
        for tensor in own.layer(index):
            assert tensor[:, 0, 0].tolist() == [value + 100 * index for value in (4, 5, 6, 7, 0, 1, 2, 3)]


def test_poison_marks_slots_only() -> None:
    """S25: NaN in the named slots, nothing else."""
    own = KVBuffer(1, 4, 1, 2, torch.bfloat16, CPU)
    own.poison([1, 3])
    assert own.layer(0)[0][:, 0, 0].isnan().tolist() == [False, True, False, True]


# ---- sizes


def test_pool_is_sized_from_memory_and_never_larger_than_needed() -> None:
    """S9: a share of free memory, capped by rows times length, in whole blocks."""
    scheduler = SchedulerConfig(max_num_seqs=2)
    assert pool_tokens(CacheConfig(), scheduler, 100, 1, CPU) == 2 * 112
    assert pool_tokens(CacheConfig(num_tokens=70), scheduler, 100, 1, CPU) == 64
    assert pool_tokens(CacheConfig(num_tokens=250, strategy="contiguous"), scheduler, 100, 1, CPU) == 200
    with pytest.raises(ConfigError, match="num_tokens"):
        pool_tokens(CacheConfig(num_tokens=8), scheduler, 100, 1, CPU)
    with pytest.raises(ConfigError, match="memory_fraction"):
        pool_tokens(CacheConfig(), scheduler, 100, 2**50, CPU)


# ---- pool


def test_pool_takes_all_or_nothing() -> None:
    """R2: a refused take changes nothing."""
    own = KVPool(PagedStrategy(4, 4), 2, 4)
    taken = own.take(3)
    with pytest.raises(CapacityError, match="2 KV blocks"):
        own.take(2)
    assert own.try_take(2) is None and own.num_free == 1
    own.share(taken[:1])
    own.release(taken)
    assert own.num_free == 3 and own.refcount(taken[0]) == 1
    own.release(taken[:1])
    own.check_invariants()
    with pytest.raises(InvariantError, match="more often"):
        own.release(taken[:1])


def test_free_blocks_cannot_be_shared() -> None:
    """R2: a reference to a free block is our own fault, and named."""
    with pytest.raises(InvariantError, match="free"):
        KVPool(PagedStrategy(4, 4), 2, 4).share([1])


def test_public_properties_and_single_argument() -> None:
    """S22, S23: RequestCaches takes the pool alone; strategy and rows are read, not written."""
    assert list(inspect.signature(RequestCaches).parameters) == ["pool"]
    own = KVPool(PagedStrategy(4, 4), 2, 4)
    assert isinstance(own.strategy, PagedStrategy) and isinstance(own.rows, RowPool)
    for name in ("strategy", "rows"):
        with pytest.raises(AttributeError):
            setattr(own, name, None)


# ---- prefix index


def test_index_is_keyed_by_exact_tokens_and_version() -> None:
    """V4, S26, P01, P03, P05: another version, another token or another parent never matches."""
    own = KVPool(PagedStrategy(8, 2), 2, 8)
    index = PrefixIndex(own)
    blocks = own.take(3)
    index.publish(0, [1, 2, 3, 4, 5, 6], blocks)
    assert index.match(0, [1, 2, 3, 4, 9, 9], 6) == blocks[:2]
    assert index.match(1, [1, 2, 3, 4], 4) == []
    assert index.match(0, [3, 4, 1, 2], 4) == []
    assert index.match(0, [1, 2, 3, 4], 3) == blocks[:1]
    index.publish(1, [1, 2], own.take(1))
    assert index.match(1, [1, 2], 2) != blocks[:1]
    index.check_invariants()


def test_publish_is_idempotent() -> None:
    """V4: the first block of equal content stays; the second one's owner keeps its own."""
    own = KVPool(PagedStrategy(8, 2), 2, 8)
    index = PrefixIndex(own)
    first, second = own.take(2), own.take(2)
    index.publish(0, [1, 2, 3, 4], first)
    index.publish(0, [1, 2, 3, 4], second)
    assert index.match(0, [1, 2, 3, 4], 4) == first
    assert [own.refcount(block) for block in first + second] == [2, 2, 1, 1]


def test_eviction_is_leaf_first_and_least_recently_used() -> None:
    """R2: parents outlive children, and blocks in use stay."""
    own = KVPool(PagedStrategy(8, 1), 2, 8)
    index = PrefixIndex(own)
    chain, other = own.take(2), own.take(1)
    index.publish(0, [1, 2], chain)
    index.publish(0, [7], other)
    own.release(chain + other)
    index.match(0, [1, 2], 2)
    assert index.num_evictable == 3
    assert index.evict(1) == 1 and index.match(0, [7], 1) == []
    own.share(chain)
    assert index.num_evictable == index.evict(5) == 0
    own.release(chain)
    assert index.evict(1) == 1 and index.match(0, [1, 2], 2) == chain[:1]
    assert index.evict(5) == 1
    assert own.num_free == 8


def test_every_block_that_is_called_evictable_can_be_had() -> None:
    """R2, S29: a held block below an idle one (its holder computed the beginning by itself) leaves the index, not its
    holder."""
    own = KVPool(PagedStrategy(8, 1), 2, 8)
    index = PrefixIndex(own)
    first, second, other = own.take(2), own.take(3), own.take(1)
    index.publish(0, [1, 2], first)
    index.publish(0, [1, 2, 3], second)
    index.publish(0, [7], other)
    own.release(first)
    assert index.num_evictable == 2
    assert index.evict(5) == 2
    assert [own.refcount(block) for block in first + second + other] == [0, 0, 1, 1, 1, 2]
    assert index.blocks() == other
    index.check_invariants()
    index.publish(0, [1, 2, 3], second)
    assert index.match(0, [1, 2, 3], 3) == second


def test_a_forgotten_version_is_free_at_once() -> None:
    """V4, P06: also while others hold some of its blocks, which then go with them."""
    own = KVPool(PagedStrategy(8, 1), 2, 8)
    index = PrefixIndex(own)
    blocks = own.take(3)
    index.publish(4, [1, 2, 3], blocks)
    own.release(blocks[:2])
    index.forget(4)
    index.forget(4)
    assert own.num_free == 7 and index.match(4, [1, 2, 3], 3) == []
    own.release(blocks[2:])
    own.check_invariants()


# ---- requests


def test_reuse_ends_before_the_last_token_and_only_whole_blocks_are_shared() -> None:
    """V4, R3: logits of the last prompt token must be computed, and half a block is nobody's prefix."""
    own = caches()
    first = own.try_open([1] * 9, 0, True)
    assert first is not None
    grow(own, first, 9)
    own.publish(first, [1] * 9)
    assert first.num_published_blocks == 2
    for length, hit in ((9, 8), (8, 4), (5, 4), (4, 0), (1, 0)):
        second = own.try_open([1] * length, 0, True)
        assert second is not None and second.num_tokens == hit
        assert second.kv_spans == ([VersionSpan(0, 0, hit)] if hit else [])
        own.close(second)
    for version, reuse in ((1, True), (0, False)):
        third = own.try_open([1] * 9, version, reuse)
        assert third is not None and third.num_tokens == 0
        own.close(third)
    own.close(first)
    own.check_invariants()


def test_forks_copy_on_write() -> None:
    """R3: whoever writes first into a shared tail gets a copy; the last holder writes in place."""
    own = caches()
    first = own.try_open([1] * 6, 0, False)
    assert first is not None
    grow(own, first, 6)
    fork = own.try_fork(first)
    assert fork is not None and fork.blocks == first.blocks and fork.row != first.row
    (copy,) = grow(own, fork, 7)
    assert copy == BlockCopy(first.blocks[1], fork.blocks[1]) and copy.src != copy.dst
    assert fork.blocks[0] == first.blocks[0]
    assert grow(own, first, 7) == ()
    own.close(first)
    own.close(fork)
    with pytest.raises(InvariantError, match="closed twice"):
        own.close(fork)
    assert own.pool.num_free == 16


def test_contiguous_caches_do_not_fork_or_share() -> None:
    """S18: one run per sequence, no second holder."""
    own = RequestCaches(KVPool(ContiguousStrategy(2, 8), 2, 1))
    cache = own.try_open([1] * 8, 0, True)
    assert cache is not None and own.try_fork(cache) is None
    grow(own, cache, 8)
    own.publish(cache, [1] * 8)
    assert own.index.blocks() == []
    assert own.try_extend(cache, 9) is None
    own.check_invariants()


def test_extension_evicts_before_it_gives_up_and_changes_nothing_when_it_does() -> None:
    """R2, S29: idle prefix blocks make room; without room the cache is as it was."""
    own = caches(num_blocks=4)
    first = own.try_open([1] * 9, 0, True)
    assert first is not None
    grow(own, first, 8)
    own.publish(first, [1] * 8)
    own.close(first)
    assert own.num_free_blocks == 4 and own.pool.num_free == 2
    second = own.try_open([2] * 16, 0, True)
    assert second is not None
    grow(own, second, 12)
    assert len(own.index.blocks()) == 1
    third = own.try_open([3] * 8, 0, True)
    assert third is not None
    before = list(third.blocks), own.pool.num_free, own.index.blocks()
    assert own.try_extend(third, 8) is None
    assert (list(third.blocks), own.pool.num_free, own.index.blocks()) == before
    own.check_invariants()


def test_mixed_kv_is_recorded_and_never_published() -> None:
    """V3, V4: a cache that two versions computed is nobody's prefix, and says who computed what."""
    own = caches()
    cache = own.try_open([1] * 12, 0, True)
    assert cache is not None
    grow(own, cache, 4, version=0)
    grow(own, cache, 8, version=1)
    grow(own, cache, 9, version=1)
    assert cache.version is None
    assert cache.kv_spans == [VersionSpan(0, 0, 4), VersionSpan(1, 4, 9)]
    own.publish(cache, [1] * 9)
    assert own.index.blocks() == []


def test_rows_run_out() -> None:
    """R2: without a row nothing opens and nothing forks."""
    own = caches(num_rows=1)
    cache = own.try_open([1], 0, True)
    assert cache is not None
    assert own.try_open([1], 0, True) is None and own.try_fork(cache) is None
    own.close(cache)
    assert own.try_open([1], 0, True) is not None


# ---- steady decode


def test_steady_is_decided_by_ordered_identity() -> None:
    """R4, S1, S5, S6: the very same sequences in the same order; a recycled row never passes for its former owner."""
    own = caches()
    a, b = own.try_open([1] * 3, 0, False), own.try_open([2] * 3, 0, False)
    assert a is not None and b is not None
    grow(own, a, 3)
    grow(own, b, 3)
    assert not own.bind(("a", "b"), [a, b]).is_steady
    again = own.bind(("a", "b"), [a, b])
    assert again.is_steady and list(again.rows) == [a.row, b.row] and not again.tables_changed
    grow(own, a, 5)
    assert own.bind(("a", "b"), [a, b]).tables_changed
    assert not own.bind(("b", "a"), [b, a]).is_steady
    assert not own.bind(("b",), [b]).is_steady
    assert own.bind(("b",), [b]).is_steady
    row = b.row
    own.close(b)
    c = own.try_open([3] * 3, 0, False)
    assert c is not None and c.row == row
    assert not own.bind(("c",), [c]).is_steady
    own.unbind()
    assert not own.bind(("c",), [c]).is_steady
