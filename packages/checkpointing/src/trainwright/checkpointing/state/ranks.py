"""What the ranks of a store tell each other: whether all went well, and a few small facts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import torch

from trainwright.checkpointing import errors
from trainwright.checkpointing.errors import CheckpointingError
from trainwright.collectives import Communicator, ReduceOp

T = TypeVar("T")
_MAX_CAUSE_BYTES = 8192
_KINDS: tuple[type[CheckpointingError], ...] = (
    errors.TreeError,
    errors.MismatchError,
    errors.NoCheckpointError,
    errors.DamagedCheckpointError,
    errors.SaveFailedError,
    errors.LoadFailedError,
    errors.NotAvailableYetError,
)


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (result, None), or (None, what was raised): the others must hear of it first."""
    try:
        return work(), None
    except Exception as error:
        return None, error


@attrs.frozen
class Ranks:
    """The ranks of one store. Every method is called by all of them, in the same order.

    Args:
        comm: The communicator that holds them.
        timeout_s: How long to wait for the slowest; None: the communicator's own.
    """

    comm: Communicator
    timeout_s: float | None = None

    def agree(
        self, error: Exception | None, doing: str, otherwise: type[CheckpointingError]
    ) -> None:
        """Return if no rank has an error; else raise the first rank's on every rank.

        Args:
            error: What went wrong on this rank.
            doing: What did not happen, for the message.
            otherwise: The class in which errors that are not this package's are raised.

        Communicates: all-reduce of 8 bytes; after an error broadcasts of up to 8 KiB.
        """
        mine = self.comm.rank if error is not None else self.comm.size
        flag = torch.tensor([mine], device=self.comm.device)
        self.comm.all_reduce(flag, ReduceOp.MIN, timeout_s=self.timeout_s).wait()
        first = int(flag.item())
        if first == self.comm.size:
            return
        kind = otherwise
        if isinstance(error, _KINDS):
            kind = next(known for known in _KINDS if isinstance(error, known))
        cause = str(error) if isinstance(error, CheckpointingError) else repr(error)
        if isinstance(error, OSError) and error.filename is not None:
            cause = f"{type(error).__name__}: {error}"
        number = _KINDS.index(kind).to_bytes(1, "little")
        data = cause.encode(errors="backslashreplace")  # names of files and keys may be anything
        told = self.broadcast(number + data[: _MAX_CAUSE_BYTES - 1], first)
        text = told[1:].decode(errors="replace")
        who = f"rank {first}: " if self.comm.size > 1 else ""
        raise _KINDS[told[0]](f"{doing}: {who}{text}") from error

    def agreed(self, work: Callable[[], T], doing: str, otherwise: type[CheckpointingError]) -> T:
        """Return what ``work`` returns here if it raises on no rank; else raise as `agree` does."""
        result, error = attempt(work)
        self.agree(error, doing, otherwise)
        return result  # type: ignore[return-value]  # without an error there is a result

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        """Return root's ``data`` on every rank.

        Communicates: broadcast of 8 bytes, broadcast of the data.
        """
        device = self.comm.device
        length = torch.tensor([len(data)], device=device)
        self.comm.broadcast(length, root, timeout_s=self.timeout_s).wait()
        count = int(length.item())
        if count == 0:
            return b""
        buffer = torch.zeros(count, dtype=torch.uint8, device=device)
        if self.comm.rank == root:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.comm.broadcast(buffer, root, timeout_s=self.timeout_s).wait()
        return bytes(buffer.cpu().numpy())

    def total(self, number: int) -> int:
        """Return the sum of every rank's number.

        Communicates: all-reduce of 8 bytes.
        """
        total = torch.tensor([number], device=self.comm.device)
        self.comm.all_reduce(total, timeout_s=self.timeout_s).wait()
        return int(total.item())

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """Return every rank's row of integers on rank 0, nothing on the others.

        Communicates: gather of 8 bytes an integer.
        """
        mine = torch.tensor([list(row)], device=self.comm.device)
        if self.comm.rank != 0:
            self.comm.gather(None, mine, 0, timeout_s=self.timeout_s).wait()
            return []
        rows = mine.new_empty((self.comm.size, len(row)))
        self.comm.gather(rows, mine, 0, timeout_s=self.timeout_s).wait()
        return [[int(x) for x in row] for row in rows.tolist()]

    def exchange(
        self, rows: Sequence[Sequence[Sequence[int]]], width: int
    ) -> list[list[list[int]]]:
        """Send rows[q], rows of ``width`` integers, to rank q; return what each rank sent here.

        Communicates: two all-to-alls, of 8 bytes a rank and of 8 bytes an integer.
        """
        comm = self.comm
        counts = torch.tensor([len(part) for part in rows], device=comm.device)
        coming = torch.empty_like(counts)
        comm.all_to_all(coming, counts, timeout_s=self.timeout_s).wait()
        sizes = [int(count) for count in coming.tolist()]
        flat = [row for part in rows for row in part]
        outgoing = torch.tensor(flat, dtype=torch.int64, device=comm.device).view(-1, width)
        incoming = outgoing.new_empty((sum(sizes), width))
        splits = [len(part) for part in rows]
        comm.all_to_all(incoming, outgoing, sizes, splits, timeout_s=self.timeout_s).wait()
        received = iter(incoming.tolist())
        return [[next(received) for _ in range(count)] for count in sizes]

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send parts[q] to rank q; return what each rank sent here.

        Communicates: two all-to-alls, of 8 bytes a rank and of the bytes.
        """
        comm = self.comm
        splits = [len(part) for part in parts]
        coming = torch.empty(comm.size, dtype=torch.int64, device=comm.device)
        counts = torch.tensor(splits, device=comm.device)
        comm.all_to_all(coming, counts, timeout_s=self.timeout_s).wait()
        sizes = [int(count) for count in coming.tolist()]
        outgoing = torch.empty(0, dtype=torch.uint8, device="cpu")
        if sum(splits):
            outgoing = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        outgoing = outgoing.to(comm.device)
        incoming = outgoing.new_empty(sum(sizes))
        comm.all_to_all(incoming, outgoing, sizes, splits, timeout_s=self.timeout_s).wait()
        data = incoming.cpu().numpy().tobytes()
        ends = [*itertools.accumulate(sizes, initial=0)]
        return [data[first:end] for first, end in itertools.pairwise(ends)]
