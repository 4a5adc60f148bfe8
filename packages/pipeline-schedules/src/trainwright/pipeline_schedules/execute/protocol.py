"""What the executor needs from others: a transport, reducers, weight keepers, products, a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from trainwright.collectives import Work

Inputs = Callable[[int, int], Mapping[str, Any]]
"""``inputs(stage, microbatch)``: keyword arguments of that stage and, on the last one, the loss."""

Loss = Callable[..., torch.Tensor]
"""``loss(output, **inputs)``: a 0-d tensor, at least float32, that is a sum and not a mean."""


Gradients = tuple[torch.Tensor | None, ...]
"""Gradients of several tensors, None where there is none or nobody wants it."""


@runtime_checkable
class Transport(Protocol):
    """Point-to-point messages between the ranks of a pipeline; a ``Communicator`` is one.

    Laws: messages of one peer and tag arrive in the order in which they were sent; neither call
    blocks until its counterpart arrives; the tensor belongs to the transfer until its ``wait``.
    Where the transport also has ``abort(cause)``, it is called when a stage raises.
    """

    @property
    def rank(self) -> int:
        """This rank's place in the pipeline."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the pipeline."""
        ...

    @property
    def device(self) -> torch.device:
        """Where received tensors are to lie."""
        ...

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        """Start sending ``tensor`` to ``peer``."""
        ...

    def recv(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        """Start receiving into ``tensor`` from ``peer``."""
        ...


@runtime_checkable
class Reducer(Protocol):
    """Adds one stage's gradients over its data-parallel ranks.

    In each step that reduces, ``last_backward`` is called once, just before the last backward of
    the stage, and ``reduce`` once, when that backward is done. Where the schedule reduces after
    every backward, both are called once for each: what one ``reduce`` adds, the next adds to.

    Where the schedule splits backwards, the last W is the last backward. What is split gets its
    gradient in W, once for each microbatch, through autograd, so that hooks on parameters fire as
    in any backward; what cannot be split has got its own in the I before, so that a reducer that
    counts gradients from ``last_backward`` on must let ``reduce`` start what it did not see.
    """

    def last_backward(self) -> None:
        """Prepare: gradients become final during the backward that follows."""
        ...

    def reduce(self) -> None:
        """Start the reductions that are not under way yet."""
        ...


@runtime_checkable
class WeightKeeper(Protocol):
    """Makes one stage's weights, of which each data-parallel rank keeps a part, whole for a while.

    The weights are read between `await_weights` and `release` only. Between runs, and after one
    that raised, they are released. A keeper may serve several stages: it is gathered with the
    first of those that need it and released when none does. It then moves all its weights each
    time, and so does more than `weight_traffic` says where a plan keeps fewer stages than it has.
    """

    def gather(self) -> None:
        """Start to make the weights whole; where that was started already, nothing happens."""
        ...

    def await_weights(self) -> None:
        """Let what this thread computes from now on see the whole weights."""
        ...

    def release(self) -> None:
        """Give up all but this rank's part; also right after `gather`, and where it has no more."""
        ...


@runtime_checkable
class SplitOperation(Protocol):
    """An operation with weights whose backward comes in two parts: how others' products join.

    It is a `torch.autograd.Function` that has these besides its ``forward`` and ``backward``, and
    is applied so that function modes see it, which costs nothing where there are none::

        tensors = (input, weight)
        if torch.overrides.has_torch_function(tensors):
            return torch.overrides.handle_torch_function(Own.apply, tensors, input, weight, comm)
        return Own.apply(input, weight, comm)

    Where a schedule splits the backward of a stage, the executor calls ``forward`` and these
    instead of ``apply``; everywhere else autograd calls ``backward``, which is whole.

    Laws: both together are ``backward``. ``weight_gradient`` comes later, once, after the
    ``input_gradient`` of the same call, and reads no weight: it may have been released. What
    ``ctx`` is given by ``forward`` and ``input_gradient`` is kept for it; the tensors saved by
    ``forward`` are too, unless ``input_gradient`` calls ``save_for_backward`` again with those
    that are still needed. ``ctx`` knows ``save_for_backward``, ``saved_tensors``,
    ``needs_input_grad`` and any attribute. Neither needs gradients of its own.

    Attributes:
        weights: Which arguments of ``forward`` are weights, by their position. An argument there
            that is no parameter, nor a cast or view of one, is not split.
    """

    weights: ClassVar[tuple[int, ...]]

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """Compute; in tensors and values by position, out a tensor or a tuple of them."""
        ...

    @staticmethod
    def input_gradient(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """The gradients of all arguments, None for weights, from those of the outputs."""
        ...

    @staticmethod
    def weight_gradient(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """The gradients of the weights alone, in the order of ``weights``."""
        ...
