"""What layers and operators cost in time and bytes: all that the planners see of a model."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from trainwright.checkpointing.errors import PlanError

from .checks import flag, non_negative, text, unique, whole
from .choices import Choice, Partial


def as_partials(partials: Iterable[Partial]) -> tuple[Partial, ...]:
    """Return the partials as a tuple."""
    return tuple(partials)


def as_choices(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Return the choices as a tuple."""
    return tuple(choices)


def as_layers(layers: Iterable[LayerCost]) -> tuple[LayerCost, ...]:
    """Return the layers as a tuple."""
    return tuple(layers)


def as_operators(operators: Iterable[OperatorCost]) -> tuple[OperatorCost, ...]:
    """Return the operators as a tuple."""
    return tuple(operators)


def as_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names as a tuple; one name alone is taken as such."""
    return (names,) if isinstance(names, str) else tuple(names)


@attrs.frozen
class LayerCost:
    """One layer of a chain.

    Args:
        name: For messages and tables.
        forward_s: Time of a forward.
        backward_s: Time of a backward, without any recomputation.
        output_bytes: Size of the output, which is the input of the next layer.
        saved_bytes: Distinct storages that autograd keeps for the backward, except the layer's
            input and parameters; with the output if the layer itself keeps it.
        output_saved: Whether ``saved_bytes`` holds the output.
        input_saved: Whether autograd keeps the input; a ReLU needs only its output.
        forward_temporary_bytes: What a forward needs besides saved bytes while it runs.
        backward_temporary_bytes: What a backward needs besides saved bytes while it runs.
        recomputable: False if running it again would not repeat the forward: what it draws or
            changes cannot be replayed.
        compressible_bytes: How many of ``saved_bytes`` are floating point; None means all.
        partials: Ways to keep less of this layer and recompute it within its own backward.

    Raises:
        PlanError: A value is out of range, or two contradict each other.
    """

    name: str = attrs.field(validator=text)
    forward_s: float = attrs.field(validator=non_negative)
    backward_s: float = attrs.field(validator=non_negative)
    output_bytes: int = attrs.field(validator=whole)
    saved_bytes: int = attrs.field(validator=whole)
    output_saved: bool = attrs.field(default=False, validator=flag, kw_only=True)
    input_saved: bool = attrs.field(default=True, validator=flag, kw_only=True)
    forward_temporary_bytes: int = attrs.field(default=0, validator=whole, kw_only=True)
    backward_temporary_bytes: int = attrs.field(default=0, validator=whole, kw_only=True)
    recomputable: bool = attrs.field(default=True, validator=flag, kw_only=True)
    compressible_bytes: int | None = attrs.field(default=None, kw_only=True)
    partials: tuple[Partial, ...] = attrs.field(default=(), converter=as_partials, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.output_saved and self.saved_bytes < self.output_bytes:
            raise PlanError(
                f"layer {self.name!r} saves its output of {self.output_bytes} bytes, "
                f"so saved_bytes cannot be {self.saved_bytes}"
            )
        able = self.compressible_bytes
        if able is not None and (type(able) is not int or not 0 <= able <= self.saved_bytes):
            raise PlanError(
                f"layer {self.name!r}: compressible_bytes must be None or from 0 to saved_bytes="
                f"{self.saved_bytes}, got {able!r}"
            )
        for partial in self.partials:
            if partial.saved_bytes > self.saved_bytes:
                raise PlanError(
                    f"layer {self.name!r}: {partial.name!r} keeps {partial.saved_bytes} bytes, "
                    f"more than the {self.saved_bytes} of keeping all"
                )

    @property
    def floating_bytes(self) -> int:
        """Bytes of ``saved_bytes`` that can be compressed."""
        return self.saved_bytes if self.compressible_bytes is None else self.compressible_bytes


@attrs.frozen
class ChainCosts:
    """Layers that run one after the other, each on the output of the one before.

    Args:
        layers: At least one.
        input_bytes: Size of the first layer's input; it counts against budgets, since the backward
            keeps it. 0 if it is held by others in any case.
        choices: Offered to plans besides keeping and recomputing.

    Raises:
        PlanError: There is no layer, or a name is used twice.
    """

    layers: tuple[LayerCost, ...] = attrs.field(converter=as_layers)
    input_bytes: int = attrs.field(validator=whole)
    choices: tuple[Choice, ...] = attrs.field(default=(), converter=as_choices)

    def __attrs_post_init__(self) -> None:
        if not self.layers:
            raise PlanError("a chain needs at least one layer, got none")
        names = [choice.name for choice in self.choices]
        unique("choice", names)
        for layer in self.layers:
            unique("choice", names + [partial.name for partial in layer.partials])

    def kept_input_bytes_of(self, layer: int) -> int:
        """Return the bytes of its input that a kept layer saves."""
        return self.input_bytes_of(layer) if self.layers[layer].input_saved else 0

    def input_bytes_of(self, layer: int) -> int:
        """Return the size of the input of layer number ``layer``."""
        return self.layers[layer - 1].output_bytes if layer else self.input_bytes


@attrs.frozen
class OperatorCost:
    """One operator of a graph.

    Args:
        name: Unique in its graph.
        forward_s: Time of running it once.
        output_bytes: Bytes held if its result is kept, auxiliary results included.
        inputs: Names of the operators whose results it reads. What it reads besides, such as
            parameters and inputs of the graph, is there in any case.
        needed: Whether some backward reads its result.
        recomputable: False if running it again would not repeat it: it must be kept if needed.
        compressible_bytes: How many of ``output_bytes`` are floating point; None means all.

    Raises:
        PlanError: A value is out of range.
    """

    name: str = attrs.field(validator=text)
    forward_s: float = attrs.field(validator=non_negative)
    output_bytes: int = attrs.field(validator=whole)
    inputs: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    needed: bool = attrs.field(default=True, validator=flag, kw_only=True)
    recomputable: bool = attrs.field(default=True, validator=flag, kw_only=True)
    compressible_bytes: int | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        able = self.compressible_bytes
        if able is not None and (type(able) is not int or not 0 <= able <= self.output_bytes):
            raise PlanError(
                f"operator {self.name!r}: compressible_bytes must be None or from 0 to "
                f"output_bytes={self.output_bytes}, got {able!r}"
            )

    @property
    def floating_bytes(self) -> int:
        """Bytes of ``output_bytes`` that can be compressed."""
        return self.output_bytes if self.compressible_bytes is None else self.compressible_bytes


@attrs.frozen
class OperatorCosts:
    """Operators in an order in which they can run.

    Args:
        operators: Each after those that it reads.
        choices: Offered to plans besides keeping and recomputing.

    Raises:
        PlanError: A name is used twice, or an operator reads one that does not come before it.
    """

    operators: tuple[OperatorCost, ...] = attrs.field(converter=as_operators)
    choices: tuple[Choice, ...] = attrs.field(default=(), converter=as_choices)

    def __attrs_post_init__(self) -> None:
        unique("choice", [choice.name for choice in self.choices])
        seen: set[str] = set()
        for operator in self.operators:
            if operator.name in seen:
                raise PlanError(f"operator {operator.name!r} is given twice")
            for name in operator.inputs:
                if name not in seen:
                    raise PlanError(
                        f"operator {operator.name!r} reads {name!r}, which does not come before "
                        "it; list operators in the order in which they run"
                    )
            seen.add(operator.name)


Costs = ChainCosts | OperatorCosts
