"""Checksums of what should be replicated, noted on each rank and compared together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import attrs
import torch

from trainwright.collectives import Communicator, ReduceOp
from trainwright.sharding.errors import ReplicaMismatchError
from trainwright.sharding.mesh.mesh import Mesh
from trainwright.sharding.placement.replicas import checksum, first_difference


@attrs.frozen(eq=False)
class _Note:
    number: int
    label: str
    advice: str
    value: torch.Tensor


class Notes:
    """What a rank has seen, in its order, by the axes on which it should be the same.

    Args:
        mesh: The mesh whose ranks take notes.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._by_axes: dict[tuple[str, ...], list[_Note]] = {}
        self._count = 0
        self._is_open = True

    def add(self, label: str, tensor: torch.Tensor, axes: tuple[str, ...], advice: str) -> None:
        """Note the checksum of a tensor; nothing is sent, and no device waited for.

        Args:
            label: What the tensor is.
            tensor: It may change afterwards.
            axes: Where it should be the same.
            advice: What to say where it is not.
        """
        if self._is_open and self._mesh.size(*axes) > 1:
            self._count += 1
            found = self._by_axes.setdefault(axes, [])
            found.append(_Note(self._count, label, advice, checksum(tensor)))

    def close(self) -> None:
        """Take no more notes, as a graph may run backward later than wanted."""
        self._is_open = False

    def compare(self, sets: Iterable[tuple[str, ...]]) -> None:
        """Compare with the ranks along each set of axes, the same sets on each; then forget.

        Raises:
            ReplicaMismatchError: Naming the first tensor that differs, or where ranks began to see
                different ones.
        """
        problems: list[tuple[int, str]] = []
        for axes in sets:
            if self._mesh.size(*axes) > 1:
                problems += self._problems(axes, self._by_axes.get(axes, []))
        self._by_axes.clear()
        if problems:
            raise ReplicaMismatchError(min(problems)[1])

    def _problems(self, axes: tuple[str, ...], notes: Sequence[_Note]) -> Iterator[tuple[int, str]]:
        comm = self._mesh.communicator(*axes)
        along = ", ".join(axes)
        is_same, shared = _num_shared([note.label for note in notes], comm)
        values = [note.value.to(comm.device) for note in notes[:shared]]
        found = first_difference(torch.stack(values), comm) if values else None
        if found is not None:
            note = notes[found.position]
            yield (
                note.number,
                f"{note.label} is declared replicated on {along}, but these differ: "
                f"{found.groups(self._mesh.ranks(*axes))}. It is the first of {len(notes)} tensors "
                f"that does: {note.advice}",
            )
        elif not is_same:
            here = notes[shared].label if shared < len(notes) else "nothing"
            yield (
                notes[shared].number if shared < len(notes) else self._count + 1,
                f"ranks along {along} ran different modules or parts of the backward: after "
                f"{shared} equal tensors, rank {self._mesh.rank} goes on with {here}. All of them "
                "must take the same path",
            )


def _num_shared(labels: Sequence[str], comm: Communicator) -> tuple[bool, int]:
    """Return whether all ranks have the same labels, and how many are the same from the first on.

    Communicates:
        One all-reduce of 32 bytes; where labels differ, one of 16 bytes a label that all have.
    """
    digests = _digests_so_far(labels)
    header = torch.tensor([len(labels), digests[-1]], device=comm.device)
    if first_difference(header, comm) is None:
        return True, len(labels)
    least = torch.tensor([len(labels)], device=comm.device)
    comm.all_reduce(least, ReduceOp.MIN).wait()
    common = int(least)
    parted = first_difference(torch.tensor(digests[1 : common + 1], device=comm.device), comm)
    return False, common if parted is None else parted.position


def _digests_so_far(labels: Sequence[str]) -> list[int]:
    """Return a number for the labels before each, and one for all of them."""
    running = hashlib.blake2b(digest_size=8)
    digests = [0]
    for label in labels:
        running.update(f"{len(label)}:{label}".encode())
        digests.append(int.from_bytes(running.digest(), "little", signed=True))
    return digests
