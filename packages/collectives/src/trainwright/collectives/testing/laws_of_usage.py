"""Laws of mistakes: they raise on every rank, before anything moves, and do no harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Communicator, Recv, ReduceOp, Send
from trainwright.collectives.testing.cases import Case

Mistake = Callable[[Communicator], object]


def mistakes_are_told_before_anything_moves(comm: Communicator, case: Case) -> None:
    """Each mistake says what was wrong, and the communicator works on."""
    for message, mistake in _MISTAKES.items():
        with pytest.raises(UsageError, match=message):
            mistake(comm)

    tensor = torch.ones(2, device=comm.device)
    comm.all_reduce(tensor).wait()
    assert tensor.tolist() == [comm.size] * 2


def parameters_are_written_without_a_graph(comm: Communicator, case: Case) -> None:
    """A leaf that requires a gradient may be combined in place; an activation may not."""
    parameter = torch.nn.Parameter(torch.ones(3, device=comm.device))

    comm.all_reduce(parameter).wait()

    assert parameter.tolist() == [comm.size] * 3
    assert parameter.is_leaf
    with pytest.raises(UsageError, match="part of a graph"):
        comm.all_reduce(parameter * 2)
    with torch.no_grad():
        comm.all_reduce(parameter * 2).wait()


def _zeros(comm: Communicator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=comm.device)


_MISTAKES: dict[str, Mistake] = {
    "AVG of int64": lambda comm: comm.all_reduce(_zeros(comm, 2).long(), ReduceOp.AVG),
    "SUM of bool": lambda comm: comm.all_reduce(_zeros(comm, 2).bool()),
    "no arithmetic in uint16": lambda comm: comm.all_reduce(_zeros(comm, 2, dtype=torch.uint16)),
    "complex numbers have no order": lambda comm: comm.all_reduce(
        _zeros(comm, 2, dtype=torch.complex64), ReduceOp.MAX
    ),
    "op must be a ReduceOp": lambda comm: comm.all_reduce(
        _zeros(comm, 2),
        "sum",  # type: ignore[arg-type]
    ),
    "cannot add float32 values": lambda comm: comm.all_reduce(
        _zeros(comm, 2), reduce_dtype=torch.int32
    ),
    "BITWISE_OR is for integers and bool, not float32": lambda comm: comm.all_reduce(
        _zeros(comm, 2), ReduceOp.BITWISE_OR
    ),
    "LOGICAL_AND combines truth values, not torch.float32": lambda comm: comm.all_reduce(
        _zeros(comm, 2), ReduceOp.LOGICAL_AND, reduce_dtype=torch.float32
    ),
    "expected a tensor, got list": lambda comm: comm.broadcast([1.0], 0),  # type: ignore[arg-type]
    "is on meta": lambda comm: comm.broadcast(torch.zeros(2, device="meta"), 0),
    "sparse": lambda comm: comm.broadcast(_zeros(comm, 2, 2).to_sparse(), 0),
    "elements share memory": lambda comm: comm.all_reduce(_zeros(comm, 1).expand(3)),
    r"strides \[1, 1\]": lambda comm: comm.all_reduce(_zeros(comm, 4).as_strided((3, 2), (1, 1))),
    "only this rank's own slice": lambda comm: _gather_into_another_slice(comm),
    "root=-1 is not a rank": lambda comm: comm.broadcast(_zeros(comm, 2), -1),
    "root=99 is not a rank": lambda comm: comm.reduce(_zeros(comm, 2), 99),
    "so the whole must be": lambda comm: comm.all_gather(
        _zeros(comm, comm.size + 1), _zeros(comm, 1)
    ),
    "the whole must be": lambda comm: comm.reduce_scatter(
        _zeros(comm, 2), _zeros(comm, comm.size, 2)
    ),
    "must be alike": lambda comm: comm.all_gather(
        _zeros(comm, comm.size), _zeros(comm, 1, dtype=torch.float64)
    ),
    "rows of one shape": lambda comm: comm.all_to_all(
        _zeros(comm, comm.size, 2), _zeros(comm, comm.size, 3)
    ),
    "add up to": lambda comm: comm.all_to_all(
        _zeros(comm, 5), _zeros(comm, 5), [5] * comm.size, [4] * comm.size
    ),
    "input_splits='ab' must be a list of": lambda comm: comm.all_to_all(
        _zeros(comm, comm.size),
        _zeros(comm, comm.size),
        input_splits="ab",  # type: ignore[arg-type]
    ),
    r"output_splits=\[1.5\] must be a list of": lambda comm: comm.all_to_all(
        _zeros(comm, comm.size),
        _zeros(comm, comm.size),
        [1.5],  # type: ignore[list-item]
    ),
    "output_splits=2 must be a list of": lambda comm: comm.all_to_all(
        _zeros(comm, comm.size),
        _zeros(comm, comm.size),
        2,  # type: ignore[arg-type]
    ),
    "input and output overlap": lambda comm: _all_to_all_in_place(comm),
    "cannot be its own peer": lambda comm: comm.send(_zeros(comm, 2), comm.rank),
    "peer=99 is not a rank": lambda comm: comm.recv(_zeros(comm, 2), 99),
    "timeout_s=-1 must be positive": lambda comm: comm.all_reduce(_zeros(comm, 2), timeout_s=-1),
    "timeout_s='x' must be a number": lambda comm: comm.all_reduce(
        _zeros(comm, 2),
        timeout_s="x",  # type: ignore[arg-type]
    ),
    "list of Send and Recv, got int in it": lambda comm: comm.exchange(
        [3],  # type: ignore[list-item]
    ),
    "list of Send and Recv, got int$": lambda comm: comm.exchange(3),  # type: ignore[arg-type]
    "tag='x' must be an int": lambda comm: comm.send(
        _zeros(comm, 2),
        0,
        "x",  # type: ignore[arg-type]
    ),
    "must pass None as input|needs input": lambda comm: comm.scatter(
        _zeros(comm, 1), None if comm.rank == 0 else _zeros(comm, comm.size), 0
    ),
    "color='red'": lambda comm: comm.split("red"),  # type: ignore[arg-type]
    "give it to wait": lambda comm: _timeout_inside(comm),
    "cannot be part of a coalesce": lambda comm: _barrier_inside(comm),
}


def _all_to_all_in_place(comm: Communicator) -> object:
    tensor = _zeros(comm, comm.size)
    return comm.all_to_all(tensor, tensor)


def _gather_into_another_slice(comm: Communicator) -> object:
    memory = _zeros(comm, 2 * comm.size + 1)
    return comm.all_gather(memory[:-1], memory[1:3])


def _timeout_inside(comm: Communicator) -> None:
    with comm.coalesce():
        comm.exchange([], timeout_s=1.0)


def _barrier_inside(comm: Communicator) -> None:
    with comm.coalesce():
        comm.barrier()


def ranks_may_be_in_different_modes(comm: Communicator, case: Case) -> None:
    """One rank may evaluate in inference mode while another trains."""
    with torch.inference_mode(comm.rank % 2 == case.root % 2):
        large = torch.ones(70_000, device=comm.device)
        small = torch.full((2,), 1.0 + comm.rank, device=comm.device)
        comm.all_reduce(large).wait()
        comm.broadcast(small, comm.size - 1).wait()
        if comm.size > 1:
            came = torch.zeros(2, device=comm.device)
            after = Send(small, (comm.rank + 1) % comm.size)
            comm.exchange([after, Recv(came, (comm.rank - 1) % comm.size)]).wait()
            assert came.tolist() == [comm.size] * 2
    assert bool((large == comm.size).all())


def written_tensors_are_not_fit_for_backward(comm: Communicator, case: Case) -> None:
    """Autograd notices that a tensor it has saved was received into; the root's is as it was."""
    saved = torch.ones(2, device=comm.device)
    product = torch.ones(2, device=comm.device, requires_grad=True) * saved
    root = case.root % comm.size

    comm.broadcast(saved, root).wait()

    if comm.rank == root:
        torch.autograd.backward(product.sum())
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(product.sum())


def modes_see_tensors_before_they_change(comm: Communicator, case: Case) -> None:
    """A dispatch mode that copies what is about to be written finds in it what it was before."""
    if comm.size == 1:
        return  # nothing changes
    for number in (3, 70_000):
        combined = torch.full((number,), 1.0 + comm.rank, device=comm.device)
        received = torch.full((number,), -1.0, device=comm.device)
        sent = torch.full((number,), 1.0 + comm.rank, device=comm.device)

        with _Copying(combined, received) as copying:
            comm.all_reduce(combined).wait()
            after = Send(sent, (comm.rank + 1) % comm.size)
            comm.exchange([after, Recv(received, (comm.rank - 1) % comm.size)]).wait()

        first, second = copying.copies
        assert first is not None
        assert bool((first == 1.0 + comm.rank).all())
        assert second is not None
        assert bool((second == -1.0).all())


class _Copying(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies tensors when something is about to write their memory for the first time."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors = tensors
        self.copies: list[torch.Tensor | None] = [None] * len(tensors)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        written = args[0] if func._schema.is_mutable else None
        for number, tensor in enumerate(self.tensors):
            if (
                self.copies[number] is None
                and isinstance(written, torch.Tensor)
                and written.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            ):
                self.copies[number] = tensor.clone()
        return func(*args, **kwargs or {})


LAWS_OF_USAGE = (
    modes_see_tensors_before_they_change,
    mistakes_are_told_before_anything_moves,
    parameters_are_written_without_a_graph,
    ranks_may_be_in_different_modes,
    written_tensors_are_not_fit_for_backward,
)
