"""What a save will write: made of the tree by all ranks together before a file is touched."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import attrs

from trainwright.checkpointing.errors import SaveFailedError, TreeError
from trainwright.checkpointing.protocol import Files

from .aliases import find_aliases
from .dtypes import dtype_name, to_bytes
from .index_writing import IndexPlan, check_tiles, plan_index
from .ledger import check_written_once, raise_problems
from .manifest import Manifest
from .ranks import Ranks
from .tree import Leaves, TensorLeaf, Tree, check_axes, dump_plain, take_leaves

T = TypeVar("T")


@attrs.frozen
class Place:
    """Where and how a store writes.

    Args:
        files: The file system.
        root: The folder of all checkpoints.
        coordinates: This rank's coordinate on each mesh axis.
        block_bytes: Bytes under one checksum.
        known: On rank 0, what `read_catalog` has seen at earlier saves.
    """

    files: Files
    root: Path
    coordinates: Mapping[str, int]
    block_bytes: int
    known: dict[str, Manifest] = attrs.field(factory=dict, eq=False, repr=False)


@attrs.frozen(eq=False)
class SavePlan:
    """What a save will write, agreed by all ranks before a file is touched.

    Args:
        step: The step.
        owned: What this rank writes; of several paths of the same memory only the first. The
            tensors are the user's; with copies in their place (``attrs.evolve``) the plan can be
            written while the user goes on.
        plain: Encoded plain values, the same on every rank.
        index: What this rank will write of the index.
        num_bytes: Bytes of all ranks' tensors.
    """

    step: int
    owned: tuple[TensorLeaf, ...]
    plain: Mapping[str, object]
    index: IndexPlan
    num_bytes: int


def plan_save(ranks: Ranks, place: Place, step: int, tree: Tree | Leaves) -> SavePlan:
    """Look at the user's tensors and agree with the other ranks that they can be saved.

    No file is touched, so nothing is left behind where it fails.

    Raises:
        TreeError: The tree cannot be stored, or the ranks' trees do not fit together.

    Communicates: collectives of a few bytes, 64 bytes for each name that this rank holds in parts,
    and path and spec of each piece that it writes.
    """
    return _Planning(ranks, place, step).plan(tree)


def check_step(step: object) -> None:
    """Raise TreeError unless ``step`` is one that can be saved."""
    if type(step) is not int or not 0 <= step < 2**62:
        raise TreeError(f"step must be an integer from 0 to 2**62 - 1, got {step!r}")


def not_saved(step: int) -> str:
    """Return what errors of a save say first."""
    return f"step {step} was not saved, and checkpoints saved before are as they were"


class _Planning:
    def __init__(self, ranks: Ranks, place: Place, step: int) -> None:
        self._ranks = ranks
        self._coordinates = place.coordinates
        self._block_bytes = place.block_bytes
        self._step = step

    def plan(self, tree: Tree | Leaves) -> SavePlan:
        leaves, owned, replicas = self._agreed(lambda: self._draft(tree))
        self._compare(leaves, owned, replicas)
        aliases = find_aliases(owned)
        num_entries = self._ranks.total(len(owned))
        owned = tuple(leaf for leaf in owned if leaf.path not in aliases)
        num_bytes = self._ranks.total(sum(leaf.num_bytes for leaf in owned))
        index = plan_index(self._ranks, owned, aliases, self._block_bytes, num_entries)
        self._agreed(lambda: self._refuse(check_tiles(index)))
        return SavePlan(self._step, owned, leaves.plain, index, num_bytes)

    def _draft(self, tree: Tree | Leaves) -> tuple[Leaves, tuple[TensorLeaf, ...], dict[str, int]]:
        """Return what this rank holds, what it writes, and a checksum of each common leaf."""
        check_step(self._step)
        leaves = tree if isinstance(tree, Leaves) else take_leaves(tree)
        rank, size = self._ranks.comm.rank, self._ranks.comm.size
        check_axes(leaves, self._coordinates, size)
        owned = tuple(
            leaf
            for leaf in leaves.tensors.values()
            if leaf.is_written_by(rank, self._coordinates)
            and (leaf.spec.numel > 0 or leaf.is_empty)
        )
        replicas = {
            path: zlib.crc32(dump_plain({path: value})) for path, value in leaves.plain.items()
        }
        for path, leaf in leaves.tensors.items():
            if leaf.everywhere:
                kind = f"{dtype_name(leaf.tensor.dtype)} {leaf.spec.global_shape}"
                replicas[path] = zlib.crc32(to_bytes(leaf.tensor), zlib.crc32(kind.encode()))
        return leaves, owned, replicas

    def _compare(
        self, leaves: Leaves, owned: tuple[TensorLeaf, ...], replicas: Mapping[str, int]
    ) -> None:
        """Raise unless all ranks save the same step, equal replicas, and each element once."""
        mine = {"step": self._step, "replicas": zlib.crc32(_dump(replicas))}
        first = json.loads(self._ranks.broadcast(_dump(mine)))
        theirs = replicas
        if self._ranks.total(int(first["replicas"] != mine["replicas"])):
            theirs = json.loads(self._ranks.broadcast(_dump(replicas)))
        written = {leaf.path for leaf in owned}
        in_parts = [leaf for leaf in leaves.tensors.values() if not leaf.everywhere]
        problems = check_written_once(self._ranks, in_parts, written)
        if first["step"] != self._step:
            problems.append(f"step {self._step} here, step {first['step']} on rank 0")
        problems += [
            f"{path}: not the same as on rank 0; what differs between ranks must be Sharded"
            for path in sorted({*theirs, *replicas})
            if theirs.get(path) != replicas.get(path)
        ]
        self._agreed(lambda: self._refuse(problems))

    def _refuse(self, problems: Sequence[str]) -> None:
        raise_problems(problems, "the ranks' states do not fit", TreeError)

    def _agreed(self, work: Callable[[], T]) -> T:
        return self._ranks.agreed(work, not_saved(self._step), SaveFailedError)


def _dump(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
