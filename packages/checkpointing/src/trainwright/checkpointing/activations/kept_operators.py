"""Keeps the results of chosen operators of a region, so that its recomputation skips them.

PyTorch's own contexts for this keep every result as it is, and want the recomputation to run the
same operators one by one, which ranks that are threads of one process do not in collectives. Here
only the operators that are kept must run in the same order, with arguments of the same shapes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import attrs
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainwright.checkpointing.errors import ReplayError
from trainwright.checkpointing.protocol import Keeper

from .holding import Holding, current_holding
from .measure import tracker
from .operators import is_random, short_name

# What is about to be written has nothing in it that is worth a copy.
_UNWRITTEN = ("empty.memory_format", "empty_like", "empty_strided", "new_empty")


class OperatorRule(Protocol):
    """Says of which operators the results are kept, and how."""

    def may_keep(self, operator: OpOverload) -> bool:
        """Whether any result of ``operator`` is kept; counted are only those."""
        ...

    def keeps(self, operator: OpOverload, number: int) -> tuple[bool, Keeper | None]:
        """Whether the result of the ``number``-th run of ``operator`` is kept, and by whom."""
        ...


@attrs.define
class OperatorReport:
    """What selective policies did, by the names of operators, added up over calls.

    Attributes:
        kept: How often a result was kept in a forward.
        recomputed: How often an operator ran in a recomputation.
    """

    kept: Counter[str] = attrs.field(factory=Counter)
    recomputed: Counter[str] = attrs.field(factory=Counter)


class KeptOperators:
    """The kept results of one forward of a region.

    Args:
        rule: What is kept.
        report: Counts what is done.
    """

    def __init__(self, rule: OperatorRule, report: OperatorReport | None = None) -> None:
        self.rule = rule
        self.report = report or OperatorReport()
        self.seen: set[OpOverload] = set()
        self._holding = current_holding()
        self._tracker = tracker()
        self._entries: dict[tuple[OpOverload, int], _Entry] = {}
        self._counts: Counter[OpOverload] = Counter()

    def keeping(self) -> TorchDispatchMode:
        """Return the mode under which the forward runs."""
        return _Keeping(self)

    def giving(self) -> TorchDispatchMode:
        """Return a mode under which a recomputation runs."""
        return _Giving(self)

    def keep(self, operator: OpOverload, arguments: Any, result: Any, drew: bool) -> None:
        """Keep a result of the forward if the rule says so."""
        number = self._counts[operator]
        self._counts[operator] += 1
        self.seen.add(operator)
        is_kept, keeper = self.rule.keeps(operator, number)
        if not is_kept or drew:  # what draws is run again, so that what follows draws the same
            return
        held = tree_map_only(torch.Tensor, lambda each: self._hold(each, keeper), result)
        self._entries[operator, number] = _Entry(_signature(arguments), held)
        self.report.kept[short_name(operator)] += 1

    def expect_change(self, tensors: Iterator[torch.Tensor]) -> None:
        """Copy kept results that are about to be changed in place."""
        if not self._entries:
            return
        changing = {t.untyped_storage()._cdata for t in tensors if t.layout == torch.strided}
        if not changing:
            return
        for key, entry in list(self._entries.items()):
            results = [each for each in tree_leaves(entry.held) if isinstance(each, _Result)]
            if not any(each.is_in(changing) for each in results):
                continue
            if short_name(key[0]) in _UNWRITTEN:
                del self._entries[key]
                continue
            for each in results:
                each.copy_if_in(changing)

    def entry(self, operator: OpOverload, number: int, arguments: Any) -> _Entry | None:
        """Return what was kept of the ``number``-th run of an operator; None: run it.

        Raises:
            ReplayError: The recomputation takes another way than the forward.
        """
        if number >= self._counts[operator]:
            raise ReplayError(
                f"the recomputation runs {short_name(operator)} more often than the forward, which "
                f"ran it {self._counts[operator]} times; the layer must do the same both times"
            )
        entry = self._entries.get((operator, number))
        if entry is not None and entry.signature != (found := _signature(arguments)):
            raise ReplayError(
                f"run {number + 1} of {short_name(operator)} has arguments {found} in the "
                f"recomputation and {entry.signature} in the forward, whose result was kept; the "
                "layer must do the same both times"
            )
        return entry

    def _hold(self, tensor: torch.Tensor, keeper: Keeper | None) -> _Result:
        alias = _detached(tensor)
        holding = self._holding if keeper is None else Holding(keeper)
        if holding is not None:
            return _Result(alias, holding.hold(alias))
        if self._tracker is not None:
            self._tracker.note(alias)
        return _Result(alias, None)


@attrs.frozen(eq=False)
class _Entry:
    """One kept result: the shapes it was made of, and a tree of `_Result`s and other values."""

    signature: tuple[Any, ...]
    held: Any

    def give(self) -> Any:
        return tree_map_only(_Result, lambda each: each.give(), self.held)


class _Result:
    """A kept tensor, by itself or held by a keeper."""

    def __init__(self, alias: torch.Tensor, held: Any) -> None:
        self._held = held
        self._tensor = alias if held is None else None
        self._version = 0 if alias.is_inference() else alias._version
        self._is_changed_later = False
        self._origin: weakref.ref[torch.UntypedStorage] | None = None
        if alias.layout == torch.strided:
            self._origin = weakref.ref(alias.untyped_storage())

    def is_in(self, changing: set[int]) -> bool:
        origin = None if self._origin is None else self._origin()
        return origin is not None and origin._cdata in changing

    def copy_if_in(self, changing: set[int]) -> None:
        if not self.is_in(changing):
            return
        self._is_changed_later = True
        self._origin = None
        with torch.inference_mode(False):  # ranks that are threads write each other's under it
            copy = self._restored().clone()
        self._held, self._tensor, self._version = None, copy, copy._version

    def give(self) -> torch.Tensor:
        tensor = self._restored()
        # The recomputation changes it as the forward did, and may not be the last one.
        return tensor.clone() if self._is_changed_later else tensor.detach()

    def _restored(self) -> torch.Tensor:
        if self._tensor is None:
            restored: torch.Tensor = self._held.restore()
            return restored
        if not self._tensor.is_inference() and self._tensor._version != self._version:
            raise ReplayError(
                f"a kept result of shape {list(self._tensor.shape)} was modified by an inplace "
                "operation after the layer had run, so the recomputation would see another; change "
                "a copy, or do not keep this operator"
            )
        return self._tensor


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps results while the forward runs."""

    def __init__(self, kept: KeptOperators) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled units run compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kept = self._kept
        if isinstance(func, OpOverload):
            if func._schema.is_mutable:
                kept.expect_change(_written(func, args, kwargs))
            elif kept.rule.may_keep(func):
                before = _generator_of(args) if is_random(func) else None
                result = func(*args, **kwargs)
                drew = before is not None and not torch.equal(before, _generator_of(args))
                kept.keep(func, (args, kwargs), result, drew)
                return result
        return func(*args, **kwargs)


class _Giving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives kept results in place of running their operators again."""

    def __init__(self, kept: KeptOperators) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._counts: Counter[OpOverload] = Counter()

    def __enter__(self) -> Any:
        self._counts.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled units run compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            if self._kept.rule.may_keep(func):
                number = self._counts[func]
                self._counts[func] += 1
                entry = self._kept.entry(func, number, (args, kwargs))
                if entry is not None:
                    return entry.give()
            if not func.is_view:
                self._kept.report.recomputed[short_name(func)] += 1
        return func(*args, **kwargs)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    # The tensor itself will belong to the graph, which would then hold itself alive. Without the
    # key, an alias made below autograd would not share the count of changes in place.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _signature(arguments: Any) -> tuple[Any, ...]:
    return tuple(
        (tuple(each.shape), each.dtype)
        for each in tree_leaves(arguments)
        if isinstance(each, torch.Tensor)
    )


def _written(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    for number, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for each in tree_leaves(value):
                if isinstance(each, torch.Tensor):
                    yield each


def _generator_of(args: tuple[Any, ...]) -> torch.Tensor:
    device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device("cpu"))
    if device.type in ("cpu", "meta"):
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state
