"""Takes the backward of products apart: input gradients at once, weight gradients owed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trainwright.pipeline_schedules.execute.errors import PipelineError
from trainwright.pipeline_schedules.execute.operations import BUILT_IN
from trainwright.pipeline_schedules.execute.protocol import Gradients, SplitOperation
from trainwright.pipeline_schedules.execute.weight_gradients import Owed, WeightGradients
from trainwright.pipeline_schedules.execute.weight_sources import parameter_of

_PLAIN = frozenset({torch.Tensor, nn.Parameter})


class SplitProducts(TorchFunctionMode):
    """While active, products with parameters have a backward that owes their weight gradients.

    That is `torch.nn.functional.linear`, a product by `torch.matmul`, ``@``, `torch.mm` or
    `torch.addmm` whose right factor is a parameter, and every `SplitOperation`. It has to be active
    in the forward of a split stage and, where it `is_replayed`, in its I.

    Args:
        debts: Where weight gradients are owed.

    Attributes:
        is_replayed: Whether it has seen a product that a backward may run again, because
            activations are recomputed.
        anchor: Makes an output of input without gradient need one, so that its backward is run.
    """

    def __init__(self, debts: WeightGradients) -> None:
        super().__init__()
        self.debts = debts
        self.is_replayed = False
        self.anchor = torch.zeros((), requires_grad=True)

    def __torch_function__(
        self,
        func: Any,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, split where it can be."""
        if func in BUILT_IN or hasattr(getattr(func, "__self__", None), "weight_gradient"):
            found = self._split(func, types, args, kwargs or {})
            if found is not None:
                return _InputGradient.apply(*found)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs) if kwargs else func(*args)

    def _split(
        self, func: Any, types: Collection[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any] | None:
        """A call that is split, anchor and arguments; or None where it is left whole."""
        if not torch.is_grad_enabled():
            self.is_replayed = True
            return None
        if types and not _PLAIN.issuperset(types):
            return None
        found = _operation(func, args, kwargs)
        if found is None:
            return None
        operation, arguments = found
        weights = tuple(arguments[place] for place in operation.weights)
        parameters = _parameters_of(weights)
        if not parameters or torch._C._are_functorch_transforms_active():
            return None
        rest = list(arguments)
        for place in operation.weights:
            rest[place] = None
        if any(value is weight for value in rest for weight in weights if value is not None):
            return None
        is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        self.is_replayed |= is_hooked
        needs = tuple(map(_needs_grad, arguments))
        keeping = self.anchor if is_hooked else None
        call = Call(operation, weights, parameters, needs, keeping, self.debts)
        return [call, None if any(map(_needs_grad, rest)) else self.anchor, *rest]


def _operation(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[type[SplitOperation], tuple[Any, ...]] | None:
    """What stands for a function, and the arguments that this takes."""
    known = BUILT_IN.get(func)
    if known is not None:
        try:
            return known.operation, known.bind(*args, **kwargs)
        except TypeError:
            return None
    owner = func.__self__
    return (owner, args) if isinstance(owner, type) and not kwargs else None


def _parameters_of(weights: Iterable[Any]) -> tuple[nn.Parameter, ...]:
    """The parameters that weights are made of; none unless that holds for all that are trained."""
    found: list[nn.Parameter] = []
    for weight in weights:
        if _needs_grad(weight):
            parameter = parameter_of(weight)
            if parameter is None:
                return ()
            found.append(parameter)
    return tuple(found)


def _needs_grad(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class Call:
    """One call of an operation: the context that it sees, and what becomes of its gradients.

    Autograd keeps what the operation saves, except for weights: these are kept by reference, so
    that they may be released, gathered and recomputed around meanwhile.
    """

    def __init__(
        self,
        operation: type[SplitOperation],
        weights: tuple[Any, ...],
        parameters: tuple[nn.Parameter, ...],
        needs_input_grad: tuple[bool, ...],
        keeping: torch.Tensor | None,
        debts: WeightGradients,
    ) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[torch.Tensor | None, ...] = ()
        self._operation = operation
        self._weights = weights
        self._parameters = parameters
        self._keeping = keeping
        self._debts = debts
        self._versions = _versions(weights)
        self._by_reference: tuple[int | None, ...] | None = None
        self._keeper: Any = None

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep tensors for the backward, in place of those that were kept before."""
        self.saved_tensors = tensors
        if self._by_reference is None:
            self._by_reference = tuple(_index(tensor, self._weights) for tensor in tensors)
            if self._keeping is not None:
                # Hooks see it now and not when the forward is over: a recomputation that has all
                # that it needs then ends before it multiplies.
                with torch.enable_grad():
                    kept = self._take_kept()
                    _Keeper.apply(self, self._keeping, *kept)  # type: ignore[no-untyped-call]

    def keep_in(self, keeper: Any) -> None:
        """Learn which context of autograd has the tensors, if it is not that of this call."""
        self._keeper = keeper

    def forward(self, rest: tuple[Any, ...]) -> tuple[Any, list[torch.Tensor | None]]:
        """Compute; gives back the result, and what autograd is to keep."""
        arguments = list(rest)
        for place, weight in zip(self._operation.weights, self._weights, strict=True):
            arguments[place] = weight
        result = self._operation.forward(self, *arguments)
        if self._by_reference is None:
            self._by_reference = ()
        return result, self._take_kept()

    def backward(self, ctx: Any, gradients: tuple[torch.Tensor, ...]) -> Any:
        """The gradients of the arguments; those of the weights are owed.

        Raises:
            PipelineError: A weight was changed since the forward, or this is no I.
        """
        self._require_same_weights()
        keeper, self._keeper = self._keeper or ctx, None
        others = iter(keeper.saved_tensors)
        self.saved_tensors = tuple(
            next(others) if place is None else self._weights[place]
            for place in self._by_reference or ()
        )
        of_arguments = self._operation.input_gradient(self, *gradients)
        if self._by_reference:
            self.saved_tensors = tuple(
                None if _index(tensor, self._weights) is not None else tensor
                for tensor in self.saved_tensors
            )
        wanted = tuple(self.needs_input_grad[place] for place in self._operation.weights)
        trained = tuple(w for w, is_wanted in zip(self._weights, wanted, strict=True) if is_wanted)
        self._weights = ()
        self._debts.add(Owed(self._operation, self, gradients, trained, wanted, self._parameters))
        return of_arguments

    def _take_kept(self) -> list[torch.Tensor | None]:
        saved, self.saved_tensors = self.saved_tensors, ()
        return [tensor for tensor in saved if _index(tensor, self._weights) is None]

    def _require_same_weights(self) -> None:
        if _versions(self._weights) != self._versions:
            raise PipelineError(
                f"a weight of a {self._operation.__name__} was changed in place between the "
                f"forward and its I, so that the gradients would be of other weights; finish the "
                f"step before the update"
            )


class _InputGradient(torch.autograd.Function):
    """An operation without its weights, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, call: Call, _: torch.Tensor | None, *rest: Any) -> Any:
        result, kept = call.forward(rest)
        ctx.save_for_backward(*kept)
        ctx.call = call
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        call: Call = ctx.call
        return (None, None, *call.backward(ctx, gradients))


class _Keeper(torch.autograd.Function):
    """A node that nobody runs, which keeps tensors."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, anchor: torch.Tensor, *tensors: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        call.keep_in(ctx)
        return anchor.detach()


def _versions(weights: Iterable[Any]) -> list[int]:
    return [weight._version for weight in weights if weight is not None]


def _index(tensor: object, weights: tuple[Any, ...]) -> int | None:
    if tensor is not None:
        for number, weight in enumerate(weights):
            if weight is tensor:
                return number
    return None
