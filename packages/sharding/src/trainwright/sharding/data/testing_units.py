"""Units that count what is gathered, and are NaN when they are not, to test what drives them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import nn

from trainwright.collectives import Communicator, Work


@attrs.define(eq=False)
class Tally:
    """What the units of one rank did.

    Args:
        gathered: Names of units in the order in which their gathers started.
        live: Those whose memory is in use.
        most_live: The most there were at once.
    """

    gathered: list[str] = attrs.field(factory=list)
    live: set[str] = attrs.field(factory=set)
    most_live: int = 0


class CountingUnit:
    """A unit whose weights are one flat tensor, of which each rank keeps a part.

    Args:
        name: Of its module.
        module: Computes with ``parameters``.
        parameters: Become views of the flat tensor.
        comm: Joins the ranks that gather.
        tally: Where to count.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        comm: Communicator,
        tally: Tally,
    ) -> None:
        self.name = name
        self.module = module
        self.is_gathered = True
        self._comm = comm
        self._tally = tally
        self._work: Work | None = None
        size = -(-sum(parameter.numel() for parameter in parameters) // comm.size)
        self._flat = parameters[0].new_zeros(size * comm.size).detach()
        place = 0
        for parameter in parameters:
            view = self._flat[place : place + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            place += parameter.numel()
        self._kept = self._flat[comm.rank * size : (comm.rank + 1) * size].clone()
        self._arriving = torch.empty_like(self._flat)
        self.release()

    def gather(self) -> None:
        """Start collecting the parts of all ranks."""
        if self.is_gathered or self._work is not None:
            return
        self._tally.gathered.append(self.name)
        self._tally.live.add(self.name)
        self._tally.most_live = max(self._tally.most_live, len(self._tally.live))
        self._work = self._comm.all_gather(self._arriving, self._kept)

    def await_weights(self) -> None:
        """Wait for the parts."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._flat.copy_(self._arriving)
            self.is_gathered = True

    def end_backward(self) -> None:
        """Nothing is reduced."""

    def release(self) -> None:
        """Let the weights be NaN."""
        self.await_weights()
        self._flat.fill_(torch.nan)
        self._tally.live.discard(self.name)
        self.is_gathered = False


def counting_units(
    model: nn.Module, names: Sequence[str], comm: Communicator
) -> tuple[list[CountingUnit], Tally]:
    """Make the named modules units, outer ones first; the name "" takes what no other holds.

    A parameter belongs to the first module of the reversed names that holds it.
    """
    tally = Tally()
    gathers = comm.split(0, comm.rank)
    assert gathers is not None
    units = []
    taken: set[int] = set()
    for name in reversed(names):
        module = model.get_submodule(name)
        mine = [parameter for parameter in module.parameters() if id(parameter) not in taken]
        taken |= {id(parameter) for parameter in mine}
        units.append(CountingUnit(name, module, mine, gathers, tally))
    return units[::-1], tally
