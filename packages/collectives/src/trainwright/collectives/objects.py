"""Python objects among ranks: sizes go first, and a mistake of one rank raises on all of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from trainwright.collectives.errors import PeerFailedError, UsageError
from trainwright.collectives.headers import Header, blank_headers, tell_groups
from trainwright.collectives.protocol import Communicator
from trainwright.collectives.uneven import gather_headers, gather_rows

T = TypeVar("T")

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]

_REFUSED = -1


def all_gather_object(
    comm: Communicator,
    value: Any,
    *,
    encode: Encode = pickle.dumps,
    decode: Decode = pickle.loads,
    timeout_s: float | None = None,
) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank.

    The default trusts the peers as one program trusts itself: reading a pickle may run code.

    Args:
        comm: The ranks.
        value: This rank's value, of any size.
        encode: Makes bytes of a value.
        decode: Makes a value of bytes.
        timeout_s: How long each step waits for the others.

    Raises:
        UsageError: On some rank ``encode`` or ``decode`` raised; the same text on every rank,
            naming the ranks. The communicator works on.

    Communicates:
        All-gather of 256 bytes a rank with the sizes; a broadcast of each rank's bytes, all
        started together; all-gather of 256 bytes a rank that tells who could read them.
    """
    data, problem = _try(encode, value, "encode its value")
    headers = gather_headers(comm, _header(data, problem), timeout_s)
    _raise_refusals("all_gather_object", headers)
    counts = [header.number for header in headers]
    whole = gather_rows(comm, _to_tensor(data or b"", comm), counts, timeout_s)
    parts = torch.split(whole.cpu(), counts)
    values: list[Any] = []
    problem = None
    for rank, part in enumerate(parts):
        found, problem = _try(decode, _to_bytes(part), f"decode the value of rank {rank}")
        if problem is not None:
            break
        values.append(found)
    _raise_refusals("all_gather_object", gather_headers(comm, _header(b"", problem), timeout_s))
    return values


def broadcast_object(
    comm: Communicator,
    value: Any,
    root: int,
    *,
    encode: Encode = pickle.dumps,
    decode: Decode = pickle.loads,
    timeout_s: float | None = None,
) -> Any:
    """Return root's value on every rank; the others' is ignored, the root gets its own back.

    Args, Raises: as `all_gather_object`; ``root`` counts within ``comm``.

    Communicates:
        Broadcast of 256 bytes with the size; broadcast of the bytes; all-gather of 256 bytes a
        rank that tells who could read them.
    """
    data: bytes | None = None
    problem: str | None = None
    if comm.rank == root:
        data, problem = _try(encode, value, "encode its value")
    note = blank_headers(1, comm.device)[0]
    if comm.rank == root:
        note = _header(data, problem).to_tensor(comm.device)
    comm.broadcast(note, root, timeout_s=timeout_s).wait()
    header = Header.from_tensor(note.cpu())
    assert header is not None
    if header.number == _REFUSED:
        raise UsageError(f"broadcast_object: rank {root} {header.text}")
    tensor = _to_tensor(data or b"\0" * header.number, comm)
    comm.broadcast(tensor, root, timeout_s=timeout_s).wait()
    found = value
    if comm.rank != root:
        found, problem = _try(decode, _to_bytes(tensor.cpu()), f"decode the value of rank {root}")
    _raise_refusals("broadcast_object", gather_headers(comm, _header(b"", problem), timeout_s))
    return found


def run_on_root(
    comm: Communicator, fn: Callable[[], T], root: int = 0, *, timeout_s: float | None = None
) -> T:
    """Call ``fn`` on one rank only and return what it returned on every rank.

    Args:
        comm: The ranks; ``root`` counts within it, so that each part of a split has its own.
        fn: Called once, on the root.
        root: Who calls it.
        timeout_s: How long the others wait for it; None: the communicator's own timeout, which a
            long download may need raised.

    Raises:
        Exception: On the root what ``fn`` raised.
        PeerFailedError: On the other ranks, when ``fn`` raised; the communicator works on.
        UsageError: The result cannot be pickled.

    Communicates:
        As `broadcast_object`.
    """
    result: Any = None
    failure: Exception | None = None
    if comm.rank == root:
        try:
            result = fn()
        except Exception as error:
            failure = error
    cause = None if failure is None else f"{type(failure).__name__}: {failure}"
    told, result = broadcast_object(comm, (cause, result), root, timeout_s=timeout_s)
    if failure is not None:
        raise failure
    if told is not None:
        raise PeerFailedError(root, told)
    return result  # type: ignore[no-any-return]


def _try(fn: Callable[[Any], Any], given: Any, what: str) -> tuple[Any, str | None]:
    try:
        return fn(given), None
    except Exception as error:
        return None, f"could not {what}: {type(error).__name__}: {error}"


def _header(data: bytes | None, problem: str | None) -> Header:
    if problem is not None:
        return Header(0, problem, _REFUSED)
    return Header(0, "", len(data or b""))


def _raise_refusals(what: str, headers: list[Header]) -> None:
    refused = {
        rank: header.text for rank, header in enumerate(headers) if header.number == _REFUSED
    }
    if refused:
        raise UsageError(f"{what}: {tell_groups(refused)}")


def _to_tensor(data: bytes, comm: Communicator) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=comm.device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.device)


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
