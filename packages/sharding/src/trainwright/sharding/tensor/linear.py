"""Linear layers cut by rows or by columns over the tensor-parallel ranks."""

# Shapes: ... any leading dims, I in_features, O out_features; a shard keeps its letters.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.collectives import Communicator, differentiable, random
from trainwright.sharding.divisions import check_divides
from trainwright.sharding.placement.parameters import ParameterPlacement
from trainwright.sharding.tensor.initial import draw_parameter_


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes its part of the outputs.

    ``weight`` is rows rank * O/tp .. (rank + 1) * O/tp of the plain layer's, ``bias`` likewise;
    both are zero until drawn or loaded. The input is replicated.

    Args:
        in_features: I.
        out_features: O of the whole layer; a multiple of ``tp.size``.
        tp: The tensor-parallel ranks.
        bias: Whether to add a bias.
        gather_output: Return all outputs on every rank instead of this rank's part.
        input_is_entered: Whether the caller has passed the input through
            ``differentiable.replicate_to_partial`` already, once for several layers, so that their
            input gradients are summed in one all-reduce.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ShardingError: ``tp.size`` does not divide ``out_features``.

    Communicates:
        Backward one all-reduce of the input's gradient, unless ``input_is_entered``; with
        ``gather_output`` forward one all-gather of the output. None at size 1.

    Source:
        Shoeybi et al., Megatron-LM (2019), section 3.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: Communicator,
        *,
        bias: bool = False,
        gather_output: bool = False,
        input_is_entered: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_divides(out_features, tp.size, "out_features", "tp")
        self.in_features = in_features
        self.out_features = out_features
        self.tp = tp
        self.gather_output = gather_output
        self.input_is_entered = input_is_entered
        local = out_features // tp.size
        self.weight = _zeros((local, in_features), device, dtype)
        self.bias = _zeros((local,), device, dtype) if bias else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``[..., I]`` to this rank's ``[..., O/tp]``, or to ``[..., O]`` if gathered."""
        if not self.input_is_entered:
            input = differentiable.replicate_to_partial(input, self.tp)
        output = F.linear(input, self.weight, self.bias)
        if not self.gather_output:
            return output
        return differentiable.shard_to_replicate(output, self.tp, dim=-1)

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Return where ``weight`` and ``bias`` lie: cut along dim 0."""
        tp = self.tp
        whole = (self.out_features, self.in_features)
        placements = {"weight": ParameterPlacement.sharded(whole, 0, rank=tp.rank, size=tp.size)}
        if self.bias is not None:
            placements["bias"] = ParameterPlacement.sharded(
                (self.out_features,), 0, rank=tp.rank, size=tp.size
            )
        return placements

    def reset_parameters(self, key: random.Key, std: float) -> None:
        """Draw ``weight`` by place under ``key`` and make ``bias`` zero."""
        _reset(self.weight, self.bias, self.parameter_placements()["weight"], key, std)

    def extra_repr(self) -> str:
        """Say the sizes of the whole layer and over how many ranks it is cut."""
        return _sizes(self.in_features, self.out_features, self.bias, self.tp)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank computes the terms of its part of the inputs.

    ``weight`` is columns rank * I/tp .. (rank + 1) * I/tp of the plain layer's, ``bias`` is whole
    on every rank and added once, after the sum; both are zero until drawn or loaded. The output is
    replicated.

    Args:
        in_features: I of the whole layer; a multiple of ``tp.size``.
        out_features: O.
        tp: The tensor-parallel ranks.
        bias: Whether to add a bias.
        input_is_parallel: Whether the input is this rank's part, as `ColumnParallelLinear` returns;
            otherwise it is replicated and cut here.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ShardingError: ``tp.size`` does not divide ``in_features``.

    Communicates:
        Forward one all-reduce of the output; without ``input_is_parallel`` backward one
        all-gather of the input's gradient. None at size 1.

    Source:
        Shoeybi et al., Megatron-LM (2019), section 3.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: Communicator,
        *,
        bias: bool = False,
        input_is_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_divides(in_features, tp.size, "in_features", "tp")
        self.in_features = in_features
        self.out_features = out_features
        self.tp = tp
        self.input_is_parallel = input_is_parallel
        self.weight = _zeros((out_features, in_features // tp.size), device, dtype)
        self.bias = _zeros((out_features,), device, dtype) if bias else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map this rank's ``[..., I/tp]``, or ``[..., I]`` if not parallel, to ``[..., O]``."""
        if not self.input_is_parallel:
            input = differentiable.replicate_to_shard(input, self.tp, dim=-1)
        if self.tp.size == 1:
            return F.linear(input, self.weight, self.bias)
        output = differentiable.partial_to_replicate(F.linear(input, self.weight), self.tp)
        return output if self.bias is None else output + self.bias

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Return where ``weight`` lies, cut along dim 1, and ``bias``, whole."""
        tp = self.tp
        whole = (self.out_features, self.in_features)
        placements = {"weight": ParameterPlacement.sharded(whole, 1, rank=tp.rank, size=tp.size)}
        if self.bias is not None:
            placements["bias"] = ParameterPlacement.replicated((self.out_features,))
        return placements

    def reset_parameters(self, key: random.Key, std: float) -> None:
        """Draw ``weight`` by place under ``key`` and make ``bias`` zero."""
        _reset(self.weight, self.bias, self.parameter_placements()["weight"], key, std)

    def extra_repr(self) -> str:
        """Say the sizes of the whole layer and over how many ranks it is cut."""
        return _sizes(self.in_features, self.out_features, self.bias, self.tp)


def _zeros(
    shape: tuple[int, ...], device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))


def _reset(
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    placement: ParameterPlacement,
    key: random.Key,
    std: float,
) -> None:
    draw_parameter_(weight, placement, key, std)
    if bias is not None:
        nn.init.zeros_(bias)


def _sizes(in_features: int, out_features: int, bias: nn.Parameter | None, tp: Communicator) -> str:
    return (
        f"in_features={in_features}, out_features={out_features}, bias={bias is not None}, "
        f"tp={tp.rank} of {tp.size}"
    )
