"""What crosses from one stage to the next: a tensor, a tuple or a dict of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch

from trainwright.pipeline_schedules.execute.errors import BoundaryError

_NO_SKIPS: Mapping[str, torch.Tensor] = MappingProxyType({})


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
    """How the tensors were packed: ``"tensor"``, ``"tuple"``, or ``"dict"`` with its keys.

    ``skips`` are the names of further tensors behind these, which travel to a later stage.
    """

    kind: str
    keys: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The positional arguments with which the next stage is called.

        A tensor is one argument, a tuple as many as it has members, a dict one dict.
        """
        own = tensors[: len(tensors) - len(self.skips)]
        if self.kind == "dict":
            return (dict(zip(self.keys, own, strict=True)),)
        return tuple(own)

    def skipping(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The skips among the tensors."""
        return dict(zip(self.skips, tensors[len(tensors) - len(self.skips) :], strict=True))


@attrs.frozen
class Crossing:
    """Everything both sides know of one transfer except the values."""

    form: Form
    specs: tuple[TensorSpec, ...]

    def __str__(self) -> str:
        own = len(self.specs) - len(self.form.skips)
        names = self.form.keys or tuple(str(slot) for slot in range(own))
        names += tuple(f"skip {name}" for name in self.form.skips)
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
class Skip:
    """A tensor that one stage hands to a later one, past those in between.

    It travels with what these stages hand on, and so does its gradient: schedules, their proofs
    and their simulations know boundaries between neighbours only, so that each boundary on the way
    carries its bytes. The stages in between neither see it nor need to know of it.

    Args:
        name: The keyword argument with which the later stage is called.
        source: The stage that returns it, in `StageOutput.skips`.
        target: The stage that is given it.
        spec: Its shape, where the boundaries on its way are declared.

    Raises:
        BoundaryError: It does not lead from a stage to a later one.
    """

    name: str
    source: int
    target: int
    spec: TensorSpec | None = None

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.source < self.target:
            raise BoundaryError(
                f"skip {self.name} must lead from a stage to a later one, got {self.source} to "
                f"{self.target}"
            )


def _skips(skips: Iterable[Skip]) -> tuple[Skip, ...]:
    return tuple(skips)


@attrs.frozen
class BoundarySpec:
    """What stages hand on: shapes, where they are declared, and skips.

    Every rank must be given the same declarations. A boundary that is not declared uses a header.

    Args:
        outputs: For a stage, what it hands to the next: one `TensorSpec`, a sequence of them for
            a tuple, or a mapping for a dict.
        skips: Tensors that pass stages.

    Raises:
        BoundaryError: Two skips of one name, or a declared boundary on the way of one without spec.
    """

    outputs: Mapping[int, Crossing] = attrs.field(converter=_crossings, factory=dict)
    skips: tuple[Skip, ...] = attrs.field(converter=_skips, default=())

    def __attrs_post_init__(self) -> None:
        names = [skip.name for skip in self.skips]
        if len(set(names)) < len(names):
            raise BoundaryError(f"each skip needs a name of its own, got {sorted(names)}")
        for stage in self.outputs:
            for skip in self.crossing(stage):
                if skip.spec is None:
                    raise BoundaryError(
                        f"the boundary behind stage {stage} is declared, so that skip "
                        f"{skip.name}, which crosses it, needs a spec as well"
                    )

    @classmethod
    def uniform(
        cls, num_stages: int, output: BoundaryLike, skips: Sequence[Skip] = ()
    ) -> BoundarySpec:
        """The same declaration for each of the ``num_stages - 1`` boundaries."""
        return cls(dict.fromkeys(range(num_stages - 1), output), skips)

    def crossing(self, stage: int) -> list[Skip]:
        """The skips that cross the boundary behind a stage."""
        return [skip for skip in self.skips if skip.source <= stage < skip.target]

    def declared(self, stage: int) -> Crossing | None:
        """All that crosses the boundary behind a stage; None where that is not declared."""
        own = self.outputs.get(stage)
        crossing = self.crossing(stage) if self.skips else []
        if own is None or not crossing:
            return own
        form = attrs.evolve(own.form, skips=tuple(skip.name for skip in crossing))
        return Crossing(form, own.specs + tuple(skip.spec for skip in crossing if skip.spec))


def describe(
    output: object, stage: int, skips: Mapping[str, torch.Tensor] = _NO_SKIPS
) -> tuple[Crossing, list[torch.Tensor]]:
    """Take a stage's output apart, and put skips behind it.

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
    form = attrs.evolve(form, skips=tuple(skips)) if skips else form
    tensors += skips.values()
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
