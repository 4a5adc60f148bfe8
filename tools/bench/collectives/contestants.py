"""The ways to run one collective on one tensor that take turns in the benchmark."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from trainwright.collectives import Communicator, TorchCommunicator
from trainwright.collectives.shm import SharedMemoryCommunicator

Run = Callable[[], None]
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
CONTESTANTS = ("gloo", "torch", "shm", "resident")
"""PyTorch's own Gloo; ours over Gloo; shared memory with ordinary tensors, and with its own."""


class Contestants:
    """The contestants of one rank; they keep their connections from one case to the next."""

    def __init__(self) -> None:
        self._torch = TorchCommunicator()
        self._shm = SharedMemoryCommunicator()

    def build(self, name: str, operation: str, num_bytes: int, dtype: torch.dtype) -> Case:
        """Return one contestant's tensors and what it does with them.

        Args:
            name: one of `CONTESTANTS`.
            operation: one of `OPERATIONS`.
            num_bytes: of the large tensor.
            dtype: of the elements.
        """
        size = self._shm.size
        numel = max(num_bytes // dtype.itemsize // size, 1) * size
        if operation == "all_reduce":
            numel = max(num_bytes // dtype.itemsize, 1)
        empty = self._shm.empty if name == "resident" else torch.empty
        large = empty((numel,), dtype=dtype)
        small = empty((max(numel // size, 1),), dtype=dtype)
        if name == "gloo":
            return Case(large, small, _native(operation, large, small))
        comm = self._torch if name == "torch" else self._shm
        return Case(large, small, _ours(comm, operation, large, small))


class Case:
    """The large and the small tensor of one contestant, and the operation on them."""

    def __init__(self, large: torch.Tensor, small: torch.Tensor, run: Run) -> None:
        self.run = run
        self._large = large
        self._small = small

    def fill(self, rank: int) -> None:
        """Give both tensors values whose sums are exact in every dtype."""
        for tensor in (self._large, self._small):
            tensor.copy_(torch.arange(tensor.numel()) % 7 + rank)

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of both tensors as they are now."""
        return self._large.clone(), self._small.clone()


def _native(operation: str, large: torch.Tensor, small: torch.Tensor) -> Run:
    if operation == "all_reduce":
        return lambda: dist.all_reduce(large)
    if operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(large, small)
    return lambda: dist.reduce_scatter_tensor(small, large)


def _ours(comm: Communicator, operation: str, large: torch.Tensor, small: torch.Tensor) -> Run:
    if operation == "all_reduce":
        return lambda: comm.all_reduce(large).wait()
    if operation == "all_gather":
        return lambda: comm.all_gather(large, small).wait()
    return lambda: comm.reduce_scatter(small, large).wait()
