"""PrefixIndex: whole blocks of KV by the exact tokens they hold, under their parent and their policy version.

Owns: a tree per version and one reference on each of its blocks. Invariant V4: a block computed under one version is
never found under another; nothing is ever flushed at an update. Eviction is leaf first, least recently used first.
Knows nothing of requests. Called by RequestCaches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ...ipc.errors import InvariantError
from .pool import KVPool


class _Node:
    """One block under its parent."""

    __slots__ = ("tokens", "block", "parent", "children")

    def __init__(self, tokens: tuple[int, ...], block: int, parent: _Node | None) -> None:
        self.tokens = tokens
        self.block = block
        self.parent = parent
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixIndex:
    """Finds and keeps the KV of equal beginnings."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._block_size = pool.strategy.block_size
        self._roots: dict[int, _Node] = {}
        self._leaves: OrderedDict[_Node, None] = OrderedDict()

    @property
    def num_evictable(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_idle

    def match(self, version: int, tokens: Sequence[int], limit: int) -> list[int]:
        """Blocks of the longest known beginning of `tokens` that ends at or before `limit` tokens; takes no
        reference."""
        node = self._roots.get(version)
        blocks: list[int] = []
        while node is not None:
            first = len(blocks) * self._block_size
            if first + self._block_size > limit:
                break
            node = node.children.get(tuple(tokens[first : first + self._block_size]))
            if node is not None:
                blocks.append(node.block)
                self._touch(node)
        return blocks

    def publish(self, version: int, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Make whole materialised blocks findable; where a beginning is known already, its own blocks stay
        (idempotent).

        Shapes: tokens [len(blocks) * block size].
        """
        node = self._roots.get(version)
        if node is None:
            node = self._roots[version] = _Node((), -1, None)
        for index, block in enumerate(blocks):
            key = tuple(tokens[index * self._block_size : (index + 1) * self._block_size])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(key, block, node)
                self._pool.enter_index(block)
                self._leaves.pop(node, None)
                self._leaves[child] = None
            self._touch(child)
            node = child

    def evict(self, count: int) -> int:
        """Free up to `count` blocks that no request holds, leaves first, oldest first; returns how many.

        A request that computed a known beginning by itself holds blocks below idle ones. Where nothing else is left,
        such a block leaves the index (it stays the request's), so that every idle block can be had.
        """
        evicted = 0
        while evicted < count and self._pool.num_idle:
            leaf = next((node for node in self._leaves if self._pool.refcount(node.block) == 1), None)
            if leaf is None:
                leaf = next(node for node in self._leaves if self._is_below_idle(node))
            else:
                evicted += 1
            self._remove(leaf)
        return evicted

    def _is_below_idle(self, node: _Node) -> bool:
        """True where a block on the way to this one is held by the index alone."""
        parent = node.parent
        while parent is not None and parent.parent is not None:
            if self._pool.refcount(parent.block) == 1:
                return True
            parent = parent.parent
        return False

    def forget(self, version: int) -> None:
        """Drop a version's whole tree; blocks that requests still hold live on with them."""
        root = self._roots.pop(version, None)
        stack = list(root.children.values()) if root is not None else []
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            self._leaves.pop(node, None)
            self._pool.leave_index(node.block)

    def _touch(self, node: _Node) -> None:
        if node in self._leaves:
            self._leaves.move_to_end(node)

    def _remove(self, leaf: _Node) -> None:
        parent = leaf.parent
        if parent is None:
            raise InvariantError("a root can't be evicted")
        del self._leaves[leaf]
        del parent.children[leaf.tokens]
        self._pool.leave_index(leaf.block)
        if not parent.children and parent.parent is not None:
            # As old as its youngest child was: next in line.
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=False)

    def blocks(self) -> list[int]:
        """Every block that the index holds."""
        found: list[int] = []
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                found.append(node.block)
        return found

    def check_invariants(self) -> None:
        """Raise InvariantError where the set of leaves isn't exactly the nodes without children, or a block is in
        twice."""
        held = self.blocks()
        if len(set(held)) != len(held):
            raise InvariantError("the prefix index holds a block twice")
        leaves, stack = set(), list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None and not node.children:
                leaves.add(node)
        if leaves != set(self._leaves):
            raise InvariantError("the prefix index lists wrong leaves")
