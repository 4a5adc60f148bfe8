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
        """A call that is split, its arguments, and those that get gradients; None: left whole."""
        if not torch.is_grad_enabled():
            self.is_replayed = True
            return None
        if types and not _PLAIN.issuperset(types):
            return None
        found = _operation(func, args, kwargs)
        if found is None:
            return None
        operation, arguments = found
        needs = tuple(isinstance(v, torch.Tensor) and v.requires_grad for v in arguments)
        parameters = _parameters_of(operation, arguments, needs)
        if not parameters or torch._C._are_functorch_transforms_active():
            return None
        is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        self.is_replayed |= is_hooked
        call = Call(operation, arguments, needs, parameters, self.debts)
        call.keeps_early = self.anchor if is_hooked else None
        inputs = [arguments[place] for place in call.inputs]
        return [call, list(arguments), *(inputs or [self.anchor])]


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


def _parameters_of(
    operation: type[SplitOperation], arguments: tuple[Any, ...], needs: tuple[bool, ...]
) -> tuple[nn.Parameter, ...]:
    """The parameters that trained weights are made of; none unless all are, and are no inputs."""
    found: list[nn.Parameter] = []
    for place in operation.weights:
        if needs[place]:
            weight = arguments[place]
            parameter = parameter_of(weight)
            if parameter is None or sum(value is weight for value in arguments) > 1:
                return ()
            found.append(parameter)
    return tuple(found)


class Call:
    """One call of an operation: the context that it sees, and what becomes of its gradients.

    Autograd keeps what the operation saves, except for weights: these are kept by reference, so
    that they may be released, gathered and recomputed around meanwhile.

    Attributes:
        inputs: Which arguments get gradients at once, by their position.
        keeps_early: What a node that keeps tensors is made of, where they are to be seen as soon as
            the operation saves them; None where autograd keeps them after the forward.
    """

    def __init__(
        self,
        operation: type[SplitOperation],
        arguments: tuple[Any, ...],
        needs_input_grad: tuple[bool, ...],
        parameters: tuple[nn.Parameter, ...],
        debts: WeightGradients,
    ) -> None:
        places = operation.weights
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[torch.Tensor | None, ...] = ()
        self.inputs = [n for n, need in enumerate(needs_input_grad) if need and n not in places]
        self.keeps_early: torch.Tensor | None = None
        self._operation = operation
        self._weights = tuple(arguments[place] for place in places)
        self._parameters = parameters
        self._debts = debts
        self._versions = _versions(self._weights)
        self._by_reference: tuple[int | None, ...] | None = None
        self._keeper: Any = None

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep tensors for the backward, in place of those that were kept before."""
        self.saved_tensors = tensors
        if self._by_reference is None:
            self._by_reference = tuple(_index(tensor, self._weights) for tensor in tensors)
            if self.keeps_early is not None:
                # Hooks see it now and not when the forward is over: a recomputation that has all
                # that it needs then ends before it multiplies.
                with torch.enable_grad():
                    kept = self._take_kept(self._by_reference)
                    _Keeper.apply(self, self.keeps_early, *kept)  # type: ignore[no-untyped-call]

    def keep_in(self, keeper: Any) -> None:
        """Learn which context of autograd has the tensors, if it is not that of this call."""
        self._keeper = keeper

    def forward(self, arguments: list[Any]) -> tuple[Any, list[torch.Tensor | None]]:
        """Compute; gives back the result, and what autograd is to keep."""
        result = self._operation.forward(self, *arguments)
        if self._by_reference is None:
            self._by_reference = ()
        return result, [] if self._keeper is not None else self._take_kept(self._by_reference)

    def backward(self, ctx: Any, gradients: tuple[torch.Tensor, ...]) -> Gradients:
        """The gradients of the inputs; those of the weights are owed.

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
        self._versions = _versions(self.saved_tensors)
        self._debts.add(Owed(self._operation, self, gradients, trained, wanted, self._parameters))
        return tuple(of_arguments[place] for place in self.inputs) or (None,)

    def require_unchanged(self) -> None:
        """Autograd watches what it keeps, which ends with I; refuse what was changed before W.

        Raises:
            PipelineError: A tensor that waits for W was changed in place.
        """
        if _versions(self.saved_tensors) != self._versions:
            raise PipelineError(
                f"a tensor that a {self._operation.__name__} kept from I to W was changed in "
                f"place, so that the weight gradients would be wrong; give each microbatch inputs "
                f"of its own"
            )

    def _take_kept(self, by_reference: tuple[int | None, ...]) -> list[torch.Tensor | None]:
        saved, self.saved_tensors = self.saved_tensors, ()
        pairs = zip(saved, by_reference, strict=True)
        return [tensor for tensor, place in pairs if place is None]

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
    def forward(ctx: Any, call: Call, arguments: list[Any], *inputs: torch.Tensor) -> Any:
        result, kept = call.forward(arguments)
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


def _versions(tensors: Iterable[Any]) -> list[int]:
    return [tensor._version for tensor in tensors if tensor is not None]


def _index(tensor: object, weights: tuple[Any, ...]) -> int | None:
    if tensor is not None:
        for number, weight in enumerate(weights):
            if weight is tensor:
                return number
    return None
