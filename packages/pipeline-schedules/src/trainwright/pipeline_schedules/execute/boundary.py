"""What crosses from one stage to the next: a tensor, a tuple or a dict of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from trainwright.pipeline_schedules.execute.errors import BoundaryError


def _shape(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


def _differentiable(spec: TensorSpec) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex


@attrs.frozen
class TensorSpec:
    """One tensor at a boundary.

    Args:
        shape: Its sizes.
        dtype: Its dtype.
        needs_grad: Whether its gradient is sent back; for floating-point dtypes that is the rule.

    Raises:
        BoundaryError: A gradient is asked for where the dtype has none, or a size is negative.
    """

    shape: tuple[int, ...] = attrs.field(converter=_shape)
    dtype: torch.dtype
    needs_grad: bool = attrs.field(default=attrs.Factory(_differentiable, takes_self=True))

    def __attrs_post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise BoundaryError(f"sizes must not be negative, got shape {list(self.shape)}")
        if self.needs_grad and not _differentiable(self):
            raise BoundaryError(f"a tensor of dtype {self.dtype} has no gradient; got needs_grad")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@attrs.frozen
class Form:
    """How the tensors were packed: ``"tensor"``, ``"tuple"``, or ``"dict"`` with its keys."""

    kind: str
    keys: tuple[str, ...] = ()

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The positional arguments with which the next stage is called.

        A tensor is one argument, a tuple as many as it has members, a dict one dict.
        """
        if self.kind == "dict":
            return (dict(zip(self.keys, tensors, strict=True)),)
        return tuple(tensors)


@attrs.frozen
class Crossing:
    """Everything both sides know of one transfer except the values."""

    form: Form
    specs: tuple[TensorSpec, ...]

    def __str__(self) -> str:
        names = self.form.keys or tuple(str(slot) for slot in range(len(self.specs)))
        parts = (f"{name}: {spec}" for name, spec in zip(names, self.specs, strict=True))
        return f"{self.form.kind} of ({', '.join(parts)})"


BoundaryLike = TensorSpec | Sequence[TensorSpec] | Mapping[str, TensorSpec]
"""A declared boundary: one spec, several for a tuple, or named ones for a dict."""


def _crossings(outputs: Mapping[int, BoundaryLike]) -> dict[int, Crossing]:
    return {int(stage): _crossing(declared, stage) for stage, declared in outputs.items()}


def _crossing(declared: BoundaryLike, stage: int) -> Crossing:
    if isinstance(declared, TensorSpec):
        return Crossing(Form("tensor"), (declared,))
    if isinstance(declared, Mapping):
        specs = tuple(declared.values())
        form = Form("dict", tuple(declared))
    else:
        specs = tuple(declared)
        form = Form("tuple")
    for spec in specs:
        if not isinstance(spec, TensorSpec):
            raise BoundaryError(
                f"the boundary behind stage {stage} must be declared by TensorSpec, "
                f"got {type(spec).__name__}"
            )
    return Crossing(form, specs)


@attrs.frozen
class BoundarySpec:
    """Declared shapes of what stages hand on, so that no header needs to travel.

    Every rank must be given the same declarations. A boundary that is not declared uses a header.

    Args:
        outputs: For a stage, what it hands to the next: one `TensorSpec`, a sequence of them for
            a tuple, or a mapping for a dict.
    """

    outputs: Mapping[int, Crossing] = attrs.field(converter=_crossings)

    @classmethod
    def uniform(cls, num_stages: int, output: BoundaryLike) -> BoundarySpec:
        """The same declaration for each of the ``num_stages - 1`` boundaries."""
        return cls(dict.fromkeys(range(num_stages - 1), output))


def describe(output: object, stage: int) -> tuple[Crossing, list[torch.Tensor]]:
    """Take a stage's output apart.

    Returns:
        What it is, with ``needs_grad`` where autograd recorded a history, and its tensors.

    Raises:
        BoundaryError: The output is not a tensor, a tuple or a dict of tensors.
    """
    if isinstance(output, torch.Tensor):
        form = Form("tensor")
        tensors: list[Any] = [output]
    elif isinstance(output, Mapping):
        form = Form("dict", tuple(output))
        tensors = list(output.values())
    elif isinstance(output, tuple | list):
        form = Form("tuple")
        tensors = list(output)
    else:
        raise _not_tensors(stage, type(output).__name__)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise _not_tensors(stage, f"a {form.kind} that holds {type(tensor).__name__}")
    for key in form.keys:
        if not isinstance(key, str):
            raise _not_tensors(stage, f"a dict with the key {key!r}")
    recording = torch.is_grad_enabled()
    specs = tuple(TensorSpec(t.shape, t.dtype, recording and t.requires_grad) for t in tensors)
    return Crossing(form, specs), tensors


def _not_tensors(stage: int, seen: str) -> BoundaryError:
    return BoundaryError(
        f"stage {stage} must hand on a tensor, a tuple of tensors or a dict of tensors by str, "
        f"got {seen}"
    )


def require_declared(declared: Crossing, seen: Crossing, stage: int) -> None:
    """Refuse an output that is not what was declared, before any of it is sent.

    Raises:
        BoundaryError: Structure, shape or dtype differ, or a gradient would be lost.
    """
    same = declared.form == seen.form and len(declared.specs) == len(seen.specs)
    for ours, theirs in zip(declared.specs, seen.specs, strict=False):
        same = same and ours.shape == theirs.shape and ours.dtype == theirs.dtype
    if not same:
        raise BoundaryError(
            f"stage {stage} handed on a {seen}, but its BoundarySpec declares a {declared}; "
            f"declare what the stage returns, or leave it out of the BoundarySpec where it varies"
        )
    for slot, (ours, theirs) in enumerate(zip(declared.specs, seen.specs, strict=True)):
        if theirs.needs_grad and not ours.needs_grad:
            raise BoundaryError(
                f"output {slot} of stage {stage} requires a gradient, but its BoundarySpec says "
                f"needs_grad=False, so that the gradient would be lost; detach it or declare it"
            )
