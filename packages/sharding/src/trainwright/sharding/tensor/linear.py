"""Linear layers cut by rows or by columns over the tensor-parallel ranks."""

# Shapes: ... any leading dims, I in_features, O out_features; a shard keeps its letters.

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import nn

from trainwright.collectives import Communicator, random
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.placement.parameters import ParameterPlacement
from trainwright.sharding.placement.partial import mark_partial
from trainwright.sharding.placement.values import Partial
from trainwright.sharding.protocol import Products
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.initial import draw_parameter_
from trainwright.sharding.tensor.multiplication import multiplication_of, multiply
from trainwright.sharding.tensor.parts import join_parts, take_part
from trainwright.sharding.tensor.products import multiply_columns, multiply_rows
from trainwright.sharding.tensor.sequence import SequenceSharding


class TensorOptions(TypedDict, total=False):
    """Device and dtype of a layer's parameters, as in `torch.zeros`."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes its part of the outputs.

    ``weight`` is this rank's rows of the plain layer's, ``bias`` likewise; both are zero until
    drawn or loaded. The input is replicated, or this rank's positions with ``sequence``.

    Args:
        in_features: I.
        out_features: O of the whole layer.
        tp: The tensor-parallel ranks.
        cut: Which outputs each rank computes; None: equal parts, so ``tp.size`` divides O. A fused
            layer has a cut of joined blocks.
        bias: Whether to add a bias.
        gather_output: Return all outputs on every rank instead of this rank's part.
        input_is_entered: Whether the caller has passed the input through
            ``differentiable.replicate_to_partial``, or `enter_sequence`, already, once for several
            layers, so that their input gradients are summed in one collective.
        sequence: How the positions are cut between products; None where they are not.
        options: ``device`` and ``dtype`` of the parameters.

    Attributes:
        products: What computes the three products; None: plain products.

    Raises:
        ShardingError: ``tp.size`` does not divide ``out_features``, or the cut is of another size,
            over other ranks, or no partition.

    Communicates:
        Backward one all-reduce of the input's gradient, started before the weight gradient and
        waited for after it; with ``sequence`` instead what `enter_sequence` says, the reduction as
        well hidden; nothing if ``input_is_entered``. With ``gather_output`` forward one all-gather
        of the output. None at size 1.

    Source:
        Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al., Reducing Activation
        Recomputation (2022), section 4.2.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: Communicator,
        *,
        cut: Cut | None = None,
        bias: bool = False,
        gather_output: bool = False,
        input_is_entered: bool = False,
        sequence: SequenceSharding | None = None,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.tp = tp
        self.cut = _checked_cut(cut, out_features, tp, "out_features")
        self.gather_output = gather_output
        self.input_is_entered = input_is_entered
        self.sequence = sequence
        self.products: Products | None = None
        local = self.cut.numel(tp.rank)
        self.weight = zeros((local, in_features), options)
        self.bias = zeros((local,), options) if bias else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``[..., I]`` to this rank's part of ``[..., O]``, or to all of it if gathered."""
        output = multiply_columns(
            input,
            self.weight,
            self.bias,
            self.tp,
            self.sequence,
            is_entered=self.input_is_entered,
            by=multiplication_of(self, self.products),
        )
        return join_parts(output, self.tp, self.cut, -1) if self.gather_output else output

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Return where ``weight`` and ``bias`` lie: cut along dim 0."""
        rank = self.tp.rank
        shape = (self.out_features, self.in_features)
        placements = {"weight": ParameterPlacement.cut(shape, 0, self.cut, rank=rank)}
        if self.bias is not None:
            placements["bias"] = ParameterPlacement.cut(shape[:1], 0, self.cut, rank=rank)
        return placements

    def feature_cuts(self) -> dict[str, tuple[Communicator, Cut]]:
        """Return which dims of the whole weight are cut, by which ranks and how.

        For what is given to ``products``: a scale belongs to the whole of a tensor.
        """
        return {"out_features": (self.tp, self.cut)}

    def reset_parameters(self, key: random.Key, std: float) -> None:
        """Draw ``weight`` by place under ``key`` and make ``bias`` zero."""
        reset(self.weight, self.bias, self.parameter_placements()["weight"], key, std)

    def extra_repr(self) -> str:
        """Say the sizes of the whole layer and over how many ranks it is cut."""
        return say_sizes(self.in_features, self.out_features, self.bias, self.tp)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank computes the terms of its part of the inputs.

    ``weight`` is this rank's columns of the plain layer's, ``bias`` is whole on every rank and
    added once, after the sum; both are zero until drawn or loaded. The output is replicated, or
    this rank's positions with ``sequence``; then the gradient of the bias is `Partial`, because
    each rank adds it to other positions.

    Args:
        in_features: I of the whole layer.
        out_features: O.
        tp: The tensor-parallel ranks.
        cut: Which inputs each rank multiplies; None: equal parts, so ``tp.size`` divides I.
        bias: Whether to add a bias.
        input_is_parallel: Whether the input is this rank's part, as `ColumnParallelLinear` returns;
            otherwise it is replicated and cut here.
        reduce_output: False returns this rank's terms of the sum, for a caller that adds others to
            them before the reduction. Set the attribute ``marks_terms`` on the layer to debug: the
            terms come as a `PartialTensor`, which nothing but a reduction may use.
        sequence: How the positions are cut between products; None where they are not.
        options: ``device`` and ``dtype`` of the parameters.

    Attributes:
        products: What computes the three products; None: plain products.

    Raises:
        ShardingError: ``tp.size`` does not divide ``in_features``, the cut is of another size,
            over other ranks, or no partition, or terms are asked for with a bias or a sequence.

    Communicates:
        Forward one all-reduce of the output, or one reduce-scatter with ``sequence``, which owes
        one all-gather backward, or nothing without ``reduce_output``; without
        ``input_is_parallel`` backward one all-gather of the input's gradient. None at size 1.

    Source:
        As `ColumnParallelLinear`.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: Communicator,
        *,
        cut: Cut | None = None,
        bias: bool = False,
        input_is_parallel: bool = True,
        reduce_output: bool = True,
        sequence: SequenceSharding | None = None,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.tp = tp
        self.cut = _checked_cut(cut, in_features, tp, "in_features")
        if not reduce_output and (bias or sequence is not None):
            raise ShardingError(
                f"with reduce_output=False the bias would be added {tp.size} times and positions "
                "cannot be cut: leave out bias and sequence, and do both after the reduction"
            )
        self.reduce_output = reduce_output
        self.marks_terms = False
        self.input_is_parallel = input_is_parallel
        self.sequence = sequence
        self.products: Products | None = None
        self.weight = zeros((out_features, self.cut.numel(tp.rank)), options)
        self.bias = zeros((out_features,), options) if bias else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map this rank's part of ``[..., I]``, or all of it if not parallel, to ``[..., O]``.

        The output is the sum over the ranks, this rank's positions of it with ``sequence``, or this
        rank's terms without ``reduce_output``.
        """
        if not self.input_is_parallel:
            input = take_part(input, self.tp, self.cut, -1)
        by = multiplication_of(self, self.products)
        if self.tp.size == 1:
            return multiply(input, self.weight, self.bias, by)
        if not self.reduce_output:
            terms = multiply(input, self.weight, None, by)
            return mark_partial(terms, "tp") if self.marks_terms else terms
        output = multiply_rows(input, self.weight, self.tp, self.sequence, by)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Return where ``weight`` lies, cut along dim 1, and ``bias``, whole."""
        shape = (self.out_features, self.in_features)
        placements = {"weight": ParameterPlacement.cut(shape, 1, self.cut, rank=self.tp.rank)}
        if self.bias is not None:
            gradient = {} if self.sequence is None else {"tp": Partial()}
            placements["bias"] = ParameterPlacement.replicated(shape[:1], gradient)
        return placements

    def feature_cuts(self) -> dict[str, tuple[Communicator, Cut]]:
        """Return which dims of the whole weight are cut, as `ColumnParallelLinear` does."""
        return {"in_features": (self.tp, self.cut)}

    def reset_parameters(self, key: random.Key, std: float) -> None:
        """Draw ``weight`` by place under ``key`` and make ``bias`` zero."""
        reset(self.weight, self.bias, self.parameter_placements()["weight"], key, std)

    def extra_repr(self) -> str:
        """Say the sizes of the whole layer and over how many ranks it is cut."""
        return say_sizes(self.in_features, self.out_features, self.bias, self.tp)


def zeros(shape: tuple[int, ...], options: TensorOptions) -> nn.Parameter:
    """Return a parameter of zeros."""
    return nn.Parameter(torch.zeros(shape, **options))


def reset(
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    placement: ParameterPlacement,
    key: random.Key,
    std: float,
) -> None:
    """Draw a weight by place and make a bias zero."""
    draw_parameter_(weight, placement, key, std)
    if bias is not None:
        nn.init.zeros_(bias)


def say_sizes(
    in_features: int, out_features: int, bias: nn.Parameter | None, tp: Communicator
) -> str:
    """Say the sizes of a whole layer and which part of it is here."""
    return (
        f"in_features={in_features}, out_features={out_features}, bias={bias is not None}, "
        f"tp={tp.rank} of {tp.size}"
    )


def _checked_cut(cut: Cut | None, size: int, tp: Communicator, what: str) -> Cut:
    if cut is None:
        return Cut.even(size, tp.size, what)
    if cut.size != size or cut.num_ranks != tp.size or not cut.is_partition:
        raise ShardingError(
            f"{what} is {size} over tp={tp.size}, and each of them lies on one rank, "
            f"but the cut is {cut}"
        )
    return cut
