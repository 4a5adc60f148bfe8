"""Keeps what fits into a budget: measures the layers at their first call and plans for the rest."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import attrs
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainwright.checkpointing.errors import PolicyError

from .following import follow
from .holding import parameters_of
from .measure import StorageSet
from .planning.chain import plan_chain
from .planning.costs import ChainCosts, LayerCost
from .planning.plan import ChainPlan
from .policy import RecomputeEvery, RecomputeOptions, recompute_all, recomputed
from .reach import Segment

# A device of so many operations and bytes a second; only the quotient counts for plans.
_FLOPS_PER_S = 1e12
_BYTES_PER_S = 1e10
# Sizes of memory told apart: a plan for inputs of a new kind is made within a step of training.
_STEPS = 100

Agree = Callable[[list[int]], list[int]]
"""Given counts of this rank, returns those that hold on all: of each the greatest, in order."""


@attrs.frozen
class WithinBudget:
    """Keeps as much as fits, and recomputes what costs the least time.

    At the first call with inputs of a kind every layer is recomputed ("full") while its saved bytes
    and operations are counted; from the second on layers run by the best plan for these counts.
    Times come from counts and not from a clock, so ranks with equal layers make equal plans. Ranks
    with unequal ones that communicate within layers would wait for each other for ever: they need
    ``agree``.

    Args:
        budget_bytes: For what is saved at any time between the beginning of a call's forward and
            the end of its backward, parameters not included. Several microbatches in flight have
            a budget each: divide what there is by their number.
        options: How layers are recomputed.
        agree: Called at the first call with inputs of a kind, on every rank that communicates
            within the layers, with as many counts; None where a rank plans for itself.

    Raises:
        PolicyError: The budget is no positive whole number.
    """

    budget_bytes: int = attrs.field()
    options: RecomputeEvery = attrs.field(factory=recompute_all, kw_only=True)
    agree: Agree | None = attrs.field(default=None, kw_only=True)
    # Ranks that are threads measure for themselves: all of them measure at their first call.
    _plans: threading.local = attrs.field(factory=threading.local, init=False, eq=False, repr=False)

    @budget_bytes.validator
    def _check_budget(self, attribute: object, value: object) -> None:
        if type(value) is not int or value < 1:
            raise PolicyError(
                f"a budget is a whole number of bytes, at least 1, got {value!r}; full "
                "recomputation keeps the least without a plan"
            )

    def __call__(self, layers: Iterable[nn.Module], hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the last layer, bitwise that of `KeepAll`.

        Raises:
            InfeasibleBudgetError: After a first forward, where no plan stays within the budget.
        """
        stack = tuple(layers)
        if not stack or not torch.is_grad_enabled():
            return Segment(stack, 0)(hidden, *args, **kwargs)
        known: dict[Any, ChainPlan] = self._plans.__dict__
        kind = str(_kind_of(stack, hidden))
        if kind in known:
            planned = follow(known[kind])
            return attrs.evolve(planned, options=self.options)(stack, hidden, *args, **kwargs)
        counts = [_bytes_of((hidden, args, kwargs))]  # all of it may stay until the end
        for number, layer in enumerate(stack):
            segment = _Counted(Segment((layer,), number), self.options)
            hidden = segment(hidden, *args, **kwargs)
            counts += segment.counts(hidden)
        if self.agree is not None:
            counts = self.agree(counts)
        known[kind] = plan_chain(_costs_of(stack, counts), self.budget_bytes, steps=_STEPS)
        return hidden

    def plans(self) -> list[ChainPlan]:
        """Return the plans that this thread has made, in the order of first calls."""
        return list(self._plans.__dict__.values())


def within_budget(
    budget_bytes: int, *, agree: Agree | None = None, **options: Unpack[RecomputeOptions]
) -> WithinBudget:
    """Return the policy that keeps what fits into a budget; see `WithinBudget`."""
    return WithinBudget(budget_bytes, options=recompute_all(**options), agree=agree)


class _Counted:
    """A layer that is recomputed, and counted in its first run."""

    def __init__(self, segment: Segment, options: RecomputeEvery) -> None:
        self._segment = segment
        self._options = options
        self._saved = _Saved()
        self._work = _Work()
        self._is_first = True

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        given = (t for t in tree_leaves((hidden, args, kwargs)) if isinstance(t, torch.Tensor))
        self._saved.exclude([*parameters_of(self._segment.layers), *given])
        counted = attrs.evolve(self._segment, runner=self._run)
        return recomputed(counted, self._options)(hidden, *args, **kwargs)

    def counts(self, output: Any) -> list[int]:
        """Return what was counted, in the order of `_costs_of`."""
        output_saved = any(
            isinstance(each, torch.Tensor) and self._saved.has(each) for each in tree_leaves(output)
        )
        return [
            int(self._work.flops),
            self._work.num_bytes,
            _bytes_of(output),
            self._saved.num_bytes,
            int(output_saved),
        ]

    def _run(self, layers: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        segment = attrs.evolve(self._segment, runner=None)
        if not self._is_first:
            return segment(hidden, *args, **kwargs)
        self._is_first = False
        with self._saved.watching(), self._work:
            return segment(hidden, *args, **kwargs)


def _costs_of(stack: tuple[nn.Module, ...], counts: list[int]) -> ChainCosts:
    input_bytes, *rest = counts
    costs = []
    for number, layer in enumerate(stack):
        flops, written, output_bytes, saved_bytes, output_saved = rest[5 * number : 5 * number + 5]
        seconds = flops / _FLOPS_PER_S + written / _BYTES_PER_S
        costs.append(
            LayerCost(
                f"{number} {type(layer).__name__}",
                seconds,
                2 * seconds,
                output_bytes,
                # Each is the greatest of all ranks, not of the same one.
                max(saved_bytes, output_bytes) if output_saved else saved_bytes,
                output_saved=bool(output_saved),
            )
        )
    return ChainCosts(costs, input_bytes)


class _Saved:
    """Counts distinct storages of what hooks save, though these may not keep them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._excluded = StorageSet()
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        self._excluded = StorageSet(tensors)

    def has(self, tensor: torch.Tensor) -> bool:
        seen = self._seen.get(tensor.untyped_storage()._cdata)
        return seen is not None and seen() is not None

    @contextmanager
    def watching(self) -> Iterator[None]:
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        save, load = hooks
        with saved_tensors_hooks(functools.partial(self._pack, save), load):
            yield

    def _pack(self, save: Any, tensor: torch.Tensor) -> Any:
        if tensor.layout == torch.strided and tensor.untyped_storage() not in self._excluded:
            storage = tensor.untyped_storage()
            if not self.has(tensor):
                self._seen[storage._cdata] = weakref.ref(storage)
                self.num_bytes += storage.nbytes()
        return save(tensor)


class _Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations of products, and bytes that operators write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.num_bytes = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled units run compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(getattr(func, "overloadpacket", None))
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=result)
        if not getattr(func, "is_view", True):
            self.num_bytes += sum(
                each.numel() * each.element_size()
                for each in tree_leaves(result)
                if isinstance(each, torch.Tensor)
            )
        return result


def _bytes_of(value: Any) -> int:
    tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    storages = [each.untyped_storage() for each in tensors if each.layout == torch.strided]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _kind_of(layers: tuple[nn.Module, ...], hidden: Any) -> tuple[Any, ...]:
    tensors = [each for each in tree_leaves(hidden) if isinstance(each, torch.Tensor)]
    return (
        [(type(layer).__name__, id(layer)) for layer in layers],
        [(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors],
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )
