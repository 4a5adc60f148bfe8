"""A debug mark for terms of a sum: whoever uses one before its reduction gets an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from trainwright.sharding.errors import ShardingError

_KNOWN: frozenset[Any] = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf",
                "grad_fn", "grad", "is_cuda", "is_cpu", "is_meta", "_version",
                "_backward_hooks", "output_nr",
            )
        ),
        *(
            getattr(torch.Tensor, name)
            for name in (
                "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset",
                "element_size", "is_contiguous", "is_floating_point", "is_complex", "__len__",
                "register_hook", "retain_grad",
            )
        ),
    }
)  # fmt: skip


class PartialTensor(torch.Tensor):
    """This rank's terms of a sum over some axes, which nothing but a transition may read.

    It has the shape, dtype and device of its terms and their place in the autograd graph; every
    other use raises. ``redistribute`` and ``apply_transition`` take it through the reduction, and
    `terms_of` gives the terms to those who know what they add. For debugging: it costs what it
    costs where it is made, and nothing where it is not. Made by `mark_partial`.
    """

    _terms: torch.Tensor
    axes: tuple[str, ...]

    @staticmethod
    def __new__(cls, terms: torch.Tensor, axes: tuple[str, ...]) -> PartialTensor:
        """Wrap terms that autograd does not know; see `mark_partial`."""
        made: PartialTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            terms.shape,
            strides=terms.stride(),
            dtype=terms.dtype,
            device=terms.device,
            requires_grad=terms.requires_grad,
        )
        made._terms = terms
        made.axes = axes
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PartialTensor(shape={tuple(self.shape)}, over={', '.join(self.axes)})"

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what describes the tensor; raise for what would use it."""
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _unreduced(func, (*args, *(kwargs or {}).values()))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Raise for what comes past Python, such as an autograd function."""
        raise _unreduced(func, (*args, *(kwargs or {}).values()))


def mark_partial(terms: torch.Tensor, *axes: str) -> PartialTensor:
    """Return terms of a sum marked as such; gradients pass through the mark.

    Args:
        terms: What this rank adds; the value is the sum over the ranks along ``axes``.
        axes: The axes of the mesh along which the terms are to be added.

    Raises:
        ShardingError: No axis is named.
    """
    if not axes:
        raise ShardingError("mark_partial() needs the axes to add over, such as 'tp'")
    marked: PartialTensor = _Mark.apply(terms_of(terms), axes)  # type: ignore[no-untyped-call]
    return marked


def terms_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain terms of a marked tensor, and any other tensor itself."""
    if not isinstance(tensor, PartialTensor):
        return tensor
    terms: torch.Tensor = _Unmark.apply(tensor)  # type: ignore[no-untyped-call]
    return terms


def axes_of(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the axes over which a tensor is marked as partial; none of a plain tensor."""
    return tensor.axes if isinstance(tensor, PartialTensor) else ()


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, terms: torch.Tensor, axes: tuple[str, ...]
    ) -> PartialTensor:
        return PartialTensor(terms.detach(), axes)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Unmark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: PartialTensor) -> torch.Tensor:
        return tensor._terms.view_as(tensor._terms)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor
    ) -> torch.Tensor:
        return gradients[0]


def _unreduced(func: Callable[..., Any], arguments: Iterable[Any]) -> ShardingError:
    found = _first_partial(arguments)
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    over = "" if found is None else f" of shape {tuple(found.shape)}"
    axes = "its axes" if found is None else ", ".join(found.axes)
    return ShardingError(
        f"{name} uses a tensor{over} that is partial over {axes}: this rank has terms of it, not "
        "the sum. Reduce it first, with redistribute(), or take terms_of() it to go on with terms"
    )


def _first_partial(arguments: Iterable[Any]) -> PartialTensor | None:
    for argument in arguments:
        if isinstance(argument, PartialTensor):
            return argument
        if isinstance(argument, list | tuple):
            inner = _first_partial(argument)
            if inner is not None:
                return inner
    return None
