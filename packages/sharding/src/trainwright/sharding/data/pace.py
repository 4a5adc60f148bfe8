"""Finds out whether all ranks have gathered the same units since they were last compared."""

from __future__ import annotations

from collections import deque

import torch

from trainwright.collectives import Communicator, ReduceOp
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.passes import Pass

_PRIME = 2**61 - 1
_SHOWN = 24


class Pace:
    """A number that says what a rank has gathered, and the comparison of all ranks' numbers.

    Within a pass a rank knows by itself what all gather. Passes in different orders, such as a
    backward before the second forward on one rank and after it on another, it can only see so:
    units of equal sizes would have got each other's weights.

    Args:
        agree: Joins the ranks that gather together.
    """

    def __init__(self, agree: Communicator) -> None:
        self._agree = agree
        self._number = 0
        self._passes: deque[Pass] = deque(maxlen=_SHOWN)
        self._under_way: tuple[torch.Tensor, torch.cuda.Event, str] | None = None

    def begin(self, kind: Pass) -> None:
        """Note that a pass begins."""
        self._passes.append(kind)

    def gather(self, index: int) -> None:
        """Note that a unit is gathered."""
        self._number = (self._number * 1_000_003 + index + 1) % _PRIME

    def forget(self) -> None:
        """Begin anew on all ranks."""
        self._number = 0
        self._passes.clear()

    def compare(self) -> None:
        """Begin anew after raising on every rank if they differ.

        On a CUDA device the host does not wait: it raises in a later call.

        Communicates:
            One all-reduce of 16 bytes.
        """
        if self._agree.size > 1:
            self._exchange()
        self.forget()

    def _exchange(self) -> None:
        device = self._agree.device
        # The largest number and, of those with the other sign, the smallest.
        both = torch.tensor([self._number, -self._number]).to(device, non_blocking=True)
        self._agree.all_reduce(both, ReduceOp.MAX).wait()
        passes = ", ".join(map(str, self._passes)) or "nothing"
        if device.type != "cuda":
            self._judge(both, passes)
            return
        if self._under_way is not None and self._under_way[1].query():  # type: ignore[no-untyped-call]
            numbers, _, earlier = self._under_way
            self._under_way = None
            self._judge(numbers, earlier)
        if self._under_way is None:
            numbers = torch.empty(2, dtype=torch.int64, pin_memory=True)
            numbers.copy_(both, non_blocking=True)
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record()
            self._under_way = (numbers, arrival, passes)

    def _judge(self, both: torch.Tensor, passes: str) -> None:
        largest, smallest = both.tolist()
        if largest != -smallest:
            self.forget()
            raise LifecycleError(
                "ranks gathered different weights in this step, so that gradients are wrong; "
                f"rank {self._agree.rank} ran: {passes}. Run the same forwards and backwards in "
                "the same order on all ranks; a rank may leave out the backward of its last "
                "forwards. Call zero_grad(discard=True) on all ranks to go on"
            )
