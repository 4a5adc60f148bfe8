"""Writes folders that PyTorch's distributed checkpoint (DCP) reads."""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import attrs
import torch

from trainwright.checkpointing.errors import CheckpointingError, SaveFailedError
from trainwright.checkpointing.protocol import Files, Writer
from trainwright.checkpointing.state.files import LocalFiles
from trainwright.checkpointing.state.ranks import Ranks, attempt
from trainwright.collectives import Communicator, SingleCommunicator

from .dcp_plan import Chunk, Plan, check_chunks, make_plan
from .publishing import Aside

T = TypeVar("T")
Spans = list[tuple[int, int]]


def write_dcp(
    folder: str | Path,
    tree: Mapping[str, Any],
    *,
    comm: Communicator | None = None,
    coordinates: Mapping[str, int] | None = None,
    files: Files | None = None,
    timeout_s: float | None = None,
) -> None:
    """Write ``tree`` as a new folder that `torch.distributed.checkpoint.load` reads.

    Every rank calls it with its own tree and writes one file, ``__RANK_0.distcp``. The names are
    the keys joined by ``.``, as DCP makes them of the same nested dictionary; a target of plain
    tensors or DTensors of any layout can be filled from it. It is written aside, synced, and
    renamed once every rank is done.

    Args:
        folder: Where; nothing may be there.
        tree: Nested dictionaries. Leaves: `Sharded` (the ranks hold parts), tensors and
            `LazyTensor` (all of it on every rank; rank 0 writes), plain values (rank 0's).
        comm: The ranks that write together; None: this process alone.
        coordinates: This rank's coordinate on each mesh axis that specs name as replicated; the
            rank with 0 on all of them writes a part.
        files: The file system.
        timeout_s: How long ranks wait for the slowest.

    Raises:
        TreeError: A leaf cannot be written, the parts do not cover their tensors exactly, or
            ``folder`` exists. Nothing is written.
        SaveFailedError: A rank could not write. Nothing stays.

    Communicates: about ten collectives of a few bytes; every rank sends rank 0 some 100 bytes a
    piece, because the format keeps the places of all pieces in one file.
    """
    ranks = Ranks(comm if comm is not None else SingleCommunicator(), timeout_s)
    place = Path(folder).absolute()
    _Write(ranks, files if files is not None else LocalFiles(), place).run(tree, coordinates or {})


@attrs.define(eq=False)
class _Write:
    ranks: Ranks
    files: Files
    folder: Path

    def run(self, tree: Mapping[str, Any], coordinates: Mapping[str, int]) -> None:
        comm = self.ranks.comm
        plan = self._agreed(lambda: make_plan(tree, coordinates, comm.rank, comm.size))
        told = self._collect([chunk.to_json() for chunk in plan.chunks])
        chunks = [[Chunk.from_json(row) for row in rows] for rows in told]
        self._agreed(lambda: check_chunks(chunks))
        token = self.ranks.broadcast(secrets.token_hex(4).encode()).decode()
        aside = Aside(self.files, self.folder, token)
        try:
            self._agreed(lambda: self._begin(aside))
            spans = self._agreed(lambda: self._write_own_file(plan, aside))
            all_spans = self._collect(spans)
            self._agreed(lambda: self._finish(plan, chunks, all_spans, aside))
        except CheckpointingError:  # a source that is damaged, too
            if comm.rank == 0:
                attempt(aside.discard)
            raise

    def _begin(self, aside: Aside) -> None:
        if self.ranks.comm.rank == 0:
            aside.check()
            aside.make()

    def _write_own_file(self, plan: Plan, aside: Aside) -> Spans:
        """Write this rank's pieces, on rank 0 also the plain values; return where each lies."""
        if not plan.chunks and not plan.objects:
            return []
        spans: Spans = []
        writer = aside.create(_file_name(self.ranks.comm.rank))
        stream = _Stream(writer)
        try:
            for value in plan.objects.values():
                spans.append(_save(value, stream))
            for chunk in plan.chunks:
                spans.append(_save(plan.read(chunk), stream))
            writer.sync()
        finally:
            writer.close()
        return spans

    def _finish(
        self, plan: Plan, chunks: list[list[Chunk]], spans: list[list[Any]], aside: Aside
    ) -> None:
        if self.ranks.comm.rank != 0:
            return
        from .dcp_encoding import encode_metadata  # two seconds, which nobody else has to wait

        count = len(plan.objects)
        of_objects = [
            (path, _file_name(0), *span)
            for path, span in zip(plan.objects, spans[0][:count], strict=True)
        ]
        spans = [spans[0][count:], *spans[1:]]
        of_chunks = [
            (chunk, _file_name(rank), *span)
            for rank, row in enumerate(chunks)
            for chunk, span in zip(row, spans[rank], strict=True)
        ]
        aside.write(".metadata", encode_metadata(of_objects, of_chunks))
        aside.publish()

    def _collect(self, rows: list[Any]) -> list[list[Any]]:
        """Return every rank's rows on rank 0, nothing on the others."""
        comm, timeout_s = self.ranks.comm, self.ranks.timeout_s
        data = json.dumps(rows, separators=(",", ":")).encode("ascii")
        lengths = self.ranks.gather([len(data)])
        if comm.rank != 0:
            message = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.device)
            comm.send(message, 0, timeout_s=timeout_s).wait()
            return []
        found: list[list[Any]] = [json.loads(data)]
        for rank in range(1, comm.size):
            coming = torch.empty(lengths[rank][0], dtype=torch.uint8, device=comm.device)
            comm.recv(coming, rank, timeout_s=timeout_s).wait()
            found.append(json.loads(bytes(coming.cpu().numpy())))
        return found

    def _agreed(self, work: Callable[[], T]) -> T:
        result, error = attempt(work)
        self.ranks.agree(error, f"{self.folder} was not written", SaveFailedError)
        return result  # type: ignore[return-value]  # without an error there is a result


class _Stream(io.RawIOBase):
    """A `Writer` as the file object that `torch.save` wants."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.num_bytes = 0
        self.failure: BaseException | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        try:
            self._writer.write(data)
        except BaseException as error:
            self.failure = error  # torch.save would speak of an unexpected position instead
            raise
        self.num_bytes += len(data)
        return len(data)


def _save(value: Any, stream: _Stream) -> tuple[int, int]:
    """Append a value as `torch.save` writes it; return where it begins and its length."""
    begin = stream.num_bytes
    try:
        torch.save(value, cast("IO[bytes]", stream))
    except Exception:
        if stream.failure is not None:
            raise stream.failure from None
        raise
    return begin, stream.num_bytes - begin


def _file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"
