"""Ways to attend over a long sequence, each timed forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import attrs
import torch
import torch.nn.functional as F

from trainwright.collectives import Communicator, Recv, Send
from trainwright.sharding.context import (
    ContextLayout,
    RingPlan,
    gathered_attention,
    ring_attention,
    ulysses_attention,
)


@attrs.frozen
class Shape:
    """What is attended to, causally, in float32.

    Args:
        tokens: Positions of the sequence.
        heads: Query heads.
        kv_heads: Key/value heads.
        size: Of a head.
    """

    tokens: int
    heads: int
    kv_heads: int
    size: int = 64


SHAPES = {
    "long": Shape(16384, 2, 2),
    "grouped": Shape(16384, 4, 1),
    "tiny": Shape(512, 2, 1),
}


class Contestant(Protocol):
    """One instance on each rank."""

    def step(self) -> None:
        """Run forward and backward once."""

    @property
    def input_bytes(self) -> int:
        """What its inputs and the gradient of its output take."""

    def results(self) -> Mapping[str, torch.Tensor] | None:
        """Return output and gradients of the last step; None where nothing is computed."""

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return of a whole result what ``results`` has."""


class Attention:
    """A way to attend, over all positions or this rank's.

    Args:
        attend: Takes q, k and v.
        take: Gives of a whole tensor what this rank has.
        tensors: q, k, v and the gradient of the output, whole.
    """

    def __init__(
        self,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        take: Callable[[torch.Tensor], torch.Tensor],
        tensors: tuple[torch.Tensor, ...],
    ) -> None:
        self.part = take
        self._attend = attend
        parts = [take(tensor).clone() for tensor in tensors]
        self._inputs = [part.requires_grad_() for part in parts[:3]]
        self._upstream = parts[3]
        self._results: dict[str, torch.Tensor] | None = None

    @property
    def input_bytes(self) -> int:
        """See `Contestant.input_bytes`."""
        return sum(tensor.nbytes for tensor in (*self._inputs, self._upstream))

    def step(self) -> None:
        """See `Contestant.step`."""
        self._results = None
        out = self._attend(*self._inputs)
        grads = torch.autograd.grad(out, self._inputs, self._upstream)
        self._results = dict(zip(("out", "q", "k", "v"), (out.detach(), *grads), strict=True))

    def results(self) -> Mapping[str, torch.Tensor] | None:
        """See `Contestant.results`."""
        return self._results

    def forget(self) -> None:
        """Drop the results of the last step."""
        self._results = None


class Exchange:
    """The messages of ring attention, forward and backward, with nothing computed meanwhile.

    Args:
        shape: What is attended to.
        layout: Which positions each rank has.
        comm: The ranks.
    """

    def __init__(self, shape: Shape, layout: ContextLayout, comm: Communicator) -> None:
        self._comm = comm
        self._plan = RingPlan.of(layout.ranges, layout.ranges, comm.rank, causal=True)
        self._own = torch.zeros(1, shape.kv_heads, layout.sizes[comm.rank], shape.size)

    @property
    def input_bytes(self) -> int:
        """See `Contestant.input_bytes`."""
        return 0

    def step(self) -> None:
        """See `Contestant.step`."""
        for _ in range(2):
            for step in self._plan.steps:
                self._move(step.user, step.given, step.owner, step.taken)
        for step in self._plan.steps:
            self._move(step.owner, step.taken, step.user, step.given)

    def results(self) -> None:
        """See `Contestant.results`."""

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """See `Contestant.part`."""
        return whole

    def _move(
        self, to: int, sent: tuple[int, int] | None, source: int, taken: tuple[int, int] | None
    ) -> None:
        messages: list[Send | Recv] = []
        for _ in ("keys", "values"):
            if sent is not None:
                # As large as what is sent; whose it is does not matter to the time.
                rows = self._own[:, :, : sent[1] - sent[0]].contiguous()
                messages.append(Send(rows, to))
            if taken is not None:
                shape = (*self._own.shape[:2], taken[1] - taken[0], self._own.shape[3])
                messages.append(Recv(self._own.new_empty(shape), source))
        if messages:
            self._comm.exchange(messages).wait()


def tensors_of(shape: Shape) -> tuple[torch.Tensor, ...]:
    """Return q, k, v and the gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    return tuple(
        torch.randn((1, count, shape.tokens, shape.size), generator=generator) for count in heads
    )


def single(shape: Shape) -> Attention:
    """Return PyTorch's fused attention of one process over all positions."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return Attention(attend, lambda whole: whole, tensors_of(shape))


def builders(shape: Shape) -> dict[str, Callable[[Communicator], Contestant]]:
    """Return what makes each contestant."""

    def shared(way: Callable[..., torch.Tensor], comm: Communicator) -> Attention:
        layout = ContextLayout("zigzag", shape.tokens, comm.size)
        return Attention(
            lambda q, k, v: way(q, k, v, layout=layout, comm=comm),
            lambda whole: layout.split(whole, 2, comm.rank),
            tensors_of(shape),
        )

    return {
        "single": lambda comm: single(shape),
        "exchange": lambda comm: Exchange(
            shape, ContextLayout("zigzag", shape.tokens, comm.size), comm
        ),
        "ring": lambda comm: shared(ring_attention, comm),
        "ulysses": lambda comm: shared(ulysses_attention, comm),
        "gathered": lambda comm: shared(gathered_attention, comm),
    }
