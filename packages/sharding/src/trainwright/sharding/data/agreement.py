"""Small plain data between ranks, and errors that all of them raise alike."""

from __future__ import annotations

import json
from typing import Any

import torch

from trainwright.collectives import Communicator, ReduceOp
from trainwright.sharding.errors import ShardingError


def agree(
    comm: Communicator, problem: str | None, error: type[ShardingError] = ShardingError
) -> None:
    """Raise on every rank if one of them has a problem.

    Args:
        comm: The ranks that must all go on or all stop.
        problem: What is wrong here, or None.
        error: What to raise.

    Raises:
        ShardingError: An ``error`` with the problems, each once, and the ranks that have them.

    Communicates:
        One all-reduce of 8 bytes; where there is a problem also an all-gather of the texts.
    """
    if comm.size == 1:
        if problem is not None:
            raise error(problem)
        return
    found = torch.tensor(int(problem is not None), device=comm.device)
    comm.all_reduce(found, ReduceOp.MAX).wait()
    if not int(found):
        return
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(all_gather_json(comm, problem)):
        if text is not None:
            ranks.setdefault(text, []).append(str(rank))
    if len(ranks) == 1:
        raise error(next(iter(ranks)))
    said = (f"on rank {', '.join(where)}: {text}" for text, where in ranks.items())
    raise error("; ".join(said))


def all_gather_json(comm: Communicator, value: Any) -> list[Any]:
    """Return every rank's value, which is made of lists, dicts, numbers and strings.

    Communicates:
        One all-gather of 8 bytes and one of the longest text.
    """
    mine = _encode(value, comm.device)
    sizes = torch.empty(comm.size, dtype=torch.int64, device=comm.device)
    comm.all_gather(sizes, torch.tensor([mine.numel()], device=comm.device)).wait()
    lengths: list[int] = sizes.tolist()
    padded = mine.new_zeros(max(lengths))
    padded[: mine.numel()] = mine
    gathered = mine.new_empty(comm.size * padded.numel())
    comm.all_gather(gathered, padded).wait()
    rows = gathered.view(comm.size, -1)
    return [_decode(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def broadcast_json(comm: Communicator, value: Any, root: int) -> Any:
    """Return root's value on every rank; the others' is not looked at.

    Communicates:
        One broadcast of 8 bytes and one of the text.
    """
    if comm.size == 1:
        return value
    is_root = comm.rank == root
    text = _encode(value, comm.device) if is_root else None
    size = torch.tensor(0 if text is None else text.numel(), device=comm.device)
    comm.broadcast(size, root).wait()
    if text is None:
        text = torch.empty(int(size), dtype=torch.uint8, device=comm.device)
    comm.broadcast(text, root).wait()
    return value if is_root else _decode(text)


def send_json(comm: Communicator, value: Any, peer: int) -> None:
    """Send a value to a rank that calls `recv_json`."""
    text = _encode(value, comm.device)
    comm.send(torch.tensor([text.numel()], device=comm.device), peer).wait()
    comm.send(text, peer).wait()


def recv_json(comm: Communicator, peer: int) -> Any:
    """Return the value that a rank sends by `send_json`."""
    size = torch.empty(1, dtype=torch.int64, device=comm.device)
    comm.recv(size, peer).wait()
    text = torch.empty(int(size), dtype=torch.uint8, device=comm.device)
    comm.recv(text, peer).wait()
    return _decode(text)


def _encode(value: Any, device: torch.device) -> torch.Tensor:
    text = bytearray(json.dumps(value, separators=(",", ":")).encode())
    return torch.frombuffer(text, dtype=torch.uint8).to(device)


def _decode(text: torch.Tensor) -> Any:
    return json.loads(text.cpu().numpy().tobytes())
