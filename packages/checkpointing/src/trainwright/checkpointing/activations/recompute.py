"""A function that keeps its arguments and computes its activations again when backward comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from torch.utils.checkpoint import checkpoint

from trainwright.checkpointing.protocol import Capture, Keeper

from .arguments import take_apart
from .hidden_generators import Watched
from .holding import Holding, current_holding
from .kept_operators import KeptOperators
from .reach import Segment
from .region import Region, RegionOptions


def as_captures(captures: Iterable[Capture]) -> tuple[Capture, ...]:
    """Return the captures as a tuple."""
    return tuple(captures)


@attrs.frozen
class Recomputed:
    """Calls ``function`` so that only its arguments are kept, bitwise equal to calling it.

    When the backward needs an activation, ``function`` runs again on the same arguments, under the
    ambient state of its first run: autocast, ``with torch.device``, every `contextvars.ContextVar`,
    active `TorchFunctionMode`s, the flags of determinism and of float32 products, and what
    ``captures`` say. Tensors may be in any argument, also
    within dictionaries, lists, dataclasses; containers are seen as they were at the first run.

    Args:
        function: A module, or a function of tensors and other values.
        captures: For state that is in none of the above (a global flag, a thread's variable): each
            is called at every forward and returns what brings the state back.
        preserve_rng_state: Replay what the forward drew from PyTorch's global generators, and from
            every `torch.Generator` among its arguments, its modules' attributes and what it closes
            over. They are read at each forward (5 KB, microseconds) and written only if it drew.
            Ranks that are threads of one process share the global ones, so there a layer that draws
            from them cannot be replayed: draw by place instead. False leaves them alone: a layer
            that draws from them gets wrong gradients.
        early_stop: Leave the recomputation once all that backward asked for is there. What follows
            the last kept tensor then runs once, not twice; ``function`` and captured contexts are
            left by an exception of PyTorch's, which they must let pass.
        inputs: Holds the tensors of the first argument, such as `keep_shards`; None leaves them.
        watched: Functions of which a first run was watched for generators that are not found; a
            policy hands its own to all it recomputes.
        verify: Compare each recomputed tensor with the forward's, bit by bit, so that whatever is
            not replayed is an error and not a wrong gradient; costs a pass over each.

    Buffers of modules are as they were at the forward, and what the recomputation writes to them is
    thrown away: running statistics are updated once. What `decide_once` returned is used again. Not
    replayed are other effects (a counter that is no buffer is increased twice), and random numbers
    of Python and numpy, unless `decide_once` draws them. A generator that is not found is an error
    of the first run.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
    """

    function: Callable[..., Any]
    captures: tuple[Capture, ...] = attrs.field(default=(), converter=as_captures, kw_only=True)
    preserve_rng_state: bool = attrs.field(default=True, kw_only=True)
    early_stop: bool = attrs.field(default=True, kw_only=True)
    inputs: Keeper | None = attrs.field(default=None, kw_only=True)
    verify: bool = attrs.field(default=False, kw_only=True)
    watched: Watched = attrs.field(factory=Watched, kw_only=True, eq=False, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``.

        Raises:
            ReplayError: It draws from a generator that is not found. In the backward, if the
                recomputation would not see what the forward saw.
            RuntimeError: In the backward, from PyTorch, if an argument tensor was changed in place,
                or the recomputation made tensors of other shapes or dtypes than the forward.
        """
        return self.run(None, args, kwargs)

    def run(self, kept: KeptOperators | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function; results that ``kept`` says are kept and not computed again."""
        if not torch.is_grad_enabled():
            return self.function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        build = take_apart((args, kwargs), tensors)
        whole = self.function
        watch = self.watched.is_new(whole.layers if isinstance(whole, Segment) else [whole])
        options = RegionOptions(self.captures, self.preserve_rng_state, self.verify, watch, kept)
        region = Region(self.function, options, (args, kwargs), build)
        # One positional argument a tensor: PyTorch saves those through autograd, whose version
        # counters notice changes. Keywords of the function cannot collide with checkpoint's own.
        with nullcontext() if self.inputs is None else self._holding(args, tensors).hooks():
            return checkpoint(
                region.run,
                *tensors,
                use_reentrant=False,
                preserve_rng_state=False,  # done by the region, which leaves idle ones alone
                early_stop=self.early_stop,
            )

    def _holding(self, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> Holding:
        assert self.inputs is not None
        first: list[torch.Tensor] = []
        take_apart(args[:1], first)
        return Holding(self.inputs, tensors[len(first) :], current_holding())


def recompute(
    function: Callable[..., Any],
    *,
    captures: Sequence[Capture] = (),
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    inputs: Keeper | None = None,
    verify: bool = False,
) -> Recomputed:
    """Return ``function`` with its activations recomputed instead of kept; see `Recomputed`."""
    return Recomputed(
        function,
        captures=captures,
        preserve_rng_state=preserve_rng_state,
        early_stop=early_stop,
        inputs=inputs,
        verify=verify,
    )
