"""What a load compares before it writes anything: the target's tensors with the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
import numpy as np
import torch

from trainwright.collectives import ShardSpec
from trainwright.collectives.overlap import find_runs

from .aliases import find_aliases
from .dtypes import dtype_name
from .index import Located
from .plain import decode_plain, merge_plain
from .tree import Leaves, TensorLeaf

Place = tuple[int, int]  # number of a file, position in it


@attrs.frozen(eq=False)
class Want:
    """A tensor of the target and what of the checkpoint goes into it.

    ``is_tied``: its memory is that of a tensor wanted before, and must be given the same values.
    """

    leaf: TensorLeaf
    located: Located
    is_tied: bool = False


@attrs.define(eq=False)
class Match:
    """What was found for this rank's leaves.

    Args:
        wants: What to fill, in the order of the tree.
        plain: Plain values by path: the checkpoint's, with keys that only the target has.
        problems: What cannot be loaded at all, a line each.
        missing: Paths of tensors of which the checkpoint has nothing.
        missing_plain: Paths of plain values of which it has nothing.
        missing_keys: Keys inside plain values that were taken from the target.
        unexpected_plain: Paths of plain values that the target does not have.
        unexpected_keys: Keys inside plain values that the target does not have.
        skipped: Paths that were not looked for.
        converted: Paths whose dtype will be changed.
        num_plain_found: How many plain values were found.
    """

    wants: list[Want] = attrs.Factory(list)
    plain: dict[str, Any] = attrs.Factory(dict)
    problems: list[str] = attrs.Factory(list)
    missing: list[str] = attrs.Factory(list)
    missing_plain: list[str] = attrs.Factory(list)
    missing_keys: list[str] = attrs.Factory(list)
    unexpected_plain: list[str] = attrs.Factory(list)
    unexpected_keys: list[str] = attrs.Factory(list)
    skipped: list[str] = attrs.Factory(list)
    converted: list[str] = attrs.Factory(list)
    num_plain_found: int = 0


def places_of(located: Located) -> list[Place]:
    """Return where the pieces begin: the same for the names of one tensor that is stored once."""
    return [(piece.file.number, piece.offset) for piece in located.pieces if piece.spec.numel]


def is_named(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern is the path, something above it, or matches it (``*``, ``?``, ``[]``)."""
    return any(
        path == pattern or path.startswith(f"{pattern}/") or fnmatchcase(path, pattern)
        for pattern in patterns
    )


def match_leaves(
    leaves: Leaves,
    located: Mapping[str, Located | None],
    plain: Mapping[str, Any],
    convert: Sequence[str],
    is_partial: bool,
) -> Match:
    """Compare this rank's leaves with what was found of them.

    Args:
        leaves: The target, without what is to be skipped.
        located: What was found, by path.
        plain: The checkpoint's plain values.
        convert: Patterns of paths whose dtype may change.
        is_partial: Whether plain values take keys from the target.
    """
    match = Match()
    _match_tensors(match, leaves, located, convert)
    # A tensor that is a plain value there, and the other way round, is missing in no mode.
    for path in [path for path in match.missing if path in plain]:
        match.missing.remove(path)
        match.problems.append(f"{path}: expected a tensor, found a plain value")
    for path, encoded in leaves.plain.items():
        there = located.get(path)
        if path in plain:
            match.num_plain_found += 1
            _take_plain(match, path, encoded, plain[path], is_partial)
        elif there is not None:
            match.problems.append(f"{path}: expected a plain value, {_describe(there)}")
        else:
            match.missing_plain.append(path)
    return match


def _match_tensors(
    match: Match,
    leaves: Leaves,
    located: Mapping[str, Located | None],
    convert: Sequence[str],
) -> None:
    tied = find_aliases(leaves.tensors.values())
    filled: dict[str, list[Place]] = {}  # by first path of some memory: what fills it
    for path, leaf in leaves.tensors.items():
        found = located.get(path)
        memory = tied.get(path, path)
        if found is None:
            match.missing.append(path)
            continue
        problem = _compare(leaf, found, convert)
        if problem is not None:
            match.problems.append(f"{path}: {problem}")
        elif filled.get(memory) != places_of(found):
            match.wants.append(Want(leaf, found, is_tied=memory in filled))
            filled.setdefault(memory, places_of(found))
            if found.dtype != leaf.tensor.dtype:
                match.converted.append(path)
    # What is missing under one name may have come under another name of the same memory.
    match.missing[:] = [path for path in match.missing if tied.get(path, path) not in filled]


def _take_plain(match: Match, path: str, encoded: Any, saved: Any, is_partial: bool) -> None:
    match.plain[path] = saved
    if is_partial:
        merged, missing, unexpected = merge_plain(path, decode_plain(encoded), saved)
        match.plain[path] = merged
        match.missing_keys.extend(missing)
        match.unexpected_keys.extend(unexpected)


def _compare(leaf: TensorLeaf, found: Located, convert: Sequence[str]) -> str | None:
    expected = f"expected {leaf.spec.global_shape} {dtype_name(leaf.tensor.dtype)}"
    there = _describe(found)
    if leaf.spec.global_shape != found.global_shape:
        return f"{expected}, {there}"
    if leaf.tensor.dtype != found.dtype:
        if not _are_alike(leaf.tensor.dtype, found.dtype):
            return f"{expected}, {there}"
        if not is_named(leaf.path, convert):
            return f"{expected}, {there}; to round or widen it, name it in convert"
    return find_hole(leaf.spec, found)


def _describe(found: Located) -> str:
    return f"found {found.global_shape} {dtype_name(found.dtype)}"


def _are_alike(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether a value of one may be rounded or widened to one of the other."""
    if torch.float4_e2m1fn_x2 in (a, b):  # two numbers in an element
        return False
    both_real = a.is_floating_point and b.is_floating_point
    return both_real or (a.is_complex and b.is_complex)


def find_hole(spec: ShardSpec, found: Located) -> str | None:
    """Return which element the pieces do not hold exactly once; saves see to it that none."""
    parts = spec.parts()
    runs = [find_runs(piece.spec.parts(), parts)[:, 1:] for piece in found.pieces]
    both = np.concatenate([np.empty((0, 2), dtype=np.int64), *runs])
    both = both[np.argsort(both[:, 0], kind="stable")]
    ends = np.cumsum(both[:, 1])
    wrong = np.flatnonzero(both[:, 0] != ends - both[:, 1])
    if len(wrong):
        start, end = int(both[wrong[0], 0]), int(ends[wrong[0]] - both[wrong[0], 1])
        what = "is not there" if start > end else "is there twice"
        return f"element {min(start, end)} of this rank's part {what}"
    held = int(ends[-1]) if len(ends) else 0
    if held != spec.numel:
        return f"only {held} of this rank's {spec.numel} elements are there"
    return None
