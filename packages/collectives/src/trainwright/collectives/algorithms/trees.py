"""The shape of binary trees of ranks, and of two of them at once.

Position p = 1..n of a tree stands as high as its lowest set bit, so that all odd positions are
leaves, a left subtree has lower positions and a right one higher, and the tree is
``floor(log2 n)`` high. The second of two trees is the mirror image of the first or, where ``n`` is
odd, moved on by one rank: what is an inner rank of one is a leaf of the other.

Source: Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, reduction and scan
(Parallel Computing, 2009).
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from trainwright.collectives.algorithms.plan import check_place


@attrs.frozen
class TreeNode:
    """A rank's place in a binary tree: whom it hears, whom it tells, and how far from the root."""

    parent: int | None
    children: tuple[int, ...]
    depth: int


def tree_height(size: int) -> int:
    """Return the number of steps from the deepest leaf of a tree of ``size`` ranks to its root."""
    check_place("tree", 0, size)
    return size.bit_length() - 1


def tree_root(size: int) -> int:
    """Return the rank at the root of the first tree."""
    return (1 << tree_height(size)) - 1


def twin_root(size: int) -> int:
    """Return the rank at the root of the second tree."""
    root = tree_root(size)
    return size - 1 - root if size % 2 == 0 else (root + 1) % size


def tree_node(size: int, rank: int) -> TreeNode:
    """Return rank's place in the first tree."""
    check_place("tree", rank, size)
    position = rank + 1
    parent = _parent(position, size)
    depth = 0
    above = parent
    while above:
        depth += 1
        above = _parent(above, size)
    children = tuple(child - 1 for child in _children(position, size))
    return TreeNode(parent - 1 if parent else None, children, depth)


def twin_node(size: int, rank: int) -> TreeNode:
    """Return rank's place in the second tree; only leaves of the first have children there."""
    check_place("tree", rank, size)
    if size % 2 == 0:
        return renamed(tree_node(size, size - 1 - rank), lambda other: size - 1 - other)
    return renamed(tree_node(size, (rank - 1) % size), lambda other: (other + 1) % size)


def node_below(size: int, rank: int, root: int) -> TreeNode:
    """Return rank's place in the first tree moved on so that ``root`` is at its root."""
    check_place("tree: root", root, size)
    shift = root - tree_root(size)
    return renamed(tree_node(size, (rank - shift) % size), lambda other: (other + shift) % size)


def renamed(node: TreeNode, name: Callable[[int], int]) -> TreeNode:
    """Return the place with other names for its neighbours."""
    parent = None if node.parent is None else name(node.parent)
    return TreeNode(parent, tuple(name(child) for child in node.children), node.depth)


def _parent(position: int, size: int) -> int:
    """Return the position above, 0 above the root."""
    lowest = position & -position
    above = (position ^ lowest) | lowest << 1
    return above if above <= size else position ^ lowest


def _children(position: int, size: int) -> list[int]:
    reach = (position & -position) >> 1
    children = [position - reach] if reach else []
    while reach and position + reach > size:
        reach >>= 1
    return [*children, position + reach] if reach else children
