"""Writes the index files of a save: what each rank says of its pieces comes together by names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from trainwright.checkpointing.protocol import Files

from .index import DataFile, Located, Piece, digest, dump_rows, load_rows
from .index_file import IndexPart, count_index_files, find_wrong_tiles, keeper_of
from .manifest import IndexRecord, index_name
from .ranks import Ranks
from .sealed import write_whole
from .tensor_file import FileRecord, plan_file
from .tree import TensorLeaf

_WIDTH = 5  # integers that tell of a file: number, size, block_bytes, two checksums


@attrs.frozen(eq=False)
class IndexPlan:
    """The index of a checkpoint, as far as it is known before a file is written.

    Args:
        of: How many index files there are.
        number: Which one this rank writes; None: none.
        tensors: By path what stands in it.
        told: The ranks that must hear of this rank's file when it is written.
        file: This rank's file; None: it has no tensor to write.
    """

    of: int
    number: int | None
    tensors: Mapping[str, Located]
    told: frozenset[int]
    file: DataFile | None


def plan_index(
    ranks: Ranks,
    owned: Sequence[TensorLeaf],
    aliases: Mapping[str, str],
    block_bytes: int,
    num_entries: int,
) -> IndexPlan:
    """Tell the keeper of each name what this rank will write of it, and hear of the kept names.

    Args:
        ranks: The ranks.
        owned: What this rank writes.
        aliases: By path the path under which the same elements are written: the index has them
            under both, so a loader of either finds them, and no rank need know of the other.
        block_bytes: Bytes of a tensor under one checksum.
        num_entries: Of all ranks' pieces.

    Communicates: two all-to-alls: for each piece that this rank writes its path and spec.
    """
    rank, size = ranks.comm.rank, ranks.comm.size
    of = count_index_files(size, num_entries)
    file, described = describe_file(rank, owned, block_bytes)
    described.update((path, described[written]) for path, written in aliases.items())
    parts: list[list[tuple[str, Located]]] = [[] for _ in range(size)]
    for path, located in described.items():
        parts[keeper_of(digest(path)[0] % of, of, size)].append((path, located))
    heard = ranks.exchange_bytes([dump_rows(part) for part in parts])
    kept = {keeper_of(number, of, size): number for number in range(of)}
    told = {keeper for keeper, part in enumerate(parts) if part}
    told.add(keeper_of(rank % of, of, size))
    return IndexPlan(of, kept.get(rank), load_rows(heard), frozenset(told), file)


def describe_file(
    number: int, owned: Sequence[TensorLeaf], block_bytes: int
) -> tuple[DataFile | None, dict[str, Located]]:
    """Return the file that will hold the leaves, None without any, and where each will be in it."""
    if not owned:
        return None, {}
    plan = plan_file(owned, block_bytes)
    file = DataFile(number, plan.size, block_bytes)
    described = {}
    for placed in plan.leaves:
        leaf = placed.leaf
        piece = Piece(file, leaf.spec, placed.offset, placed.sums)
        described[leaf.path] = Located(leaf.tensor.dtype, leaf.spec.global_shape, (piece,))
    return file, described


def check_tiles(plan: IndexPlan) -> list[str]:
    """Return what is wrong with the tensors of which this rank keeps the names."""
    return find_wrong_tiles(plan.tensors)


def tell_of_file(ranks: Ranks, plan: IndexPlan, record: FileRecord | None) -> list[list[int]]:
    """Tell those who wait for it of this rank's file; return the rows that came here.

    Communicates: two all-to-alls of 40 bytes for each file that a kept tensor lies in.
    """
    outgoing: list[list[list[int]]] = [[] for _ in range(ranks.comm.size)]
    if plan.file is not None and record is not None:
        row = [ranks.comm.rank, record.size, plan.file.block_bytes]
        for keeper in plan.told:
            outgoing[keeper].append([*row, record.header_crc32, record.table_crc32])
    return [row for part in ranks.exchange(outgoing, _WIDTH) for row in part]


def write_index(
    files: Files, folder: Path, plan: IndexPlan, rows: Sequence[Sequence[int]]
) -> IndexRecord | None:
    """Write the index file that this rank keeps, if it keeps one, and sync it.

    Raises:
        OSError: It cannot be written.
    """
    if plan.number is None:
        return None
    described = {
        number: (DataFile(number, size, block_bytes), FileRecord(size, header, table))
        for number, size, block_bytes, header, table in rows
    }
    data, record = IndexPart(plan.number, plan.of, described, plan.tensors).encode()
    write_whole(files, folder / index_name(plan.number), data)
    return record
