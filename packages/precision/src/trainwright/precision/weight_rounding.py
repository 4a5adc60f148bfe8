"""Ways to write float32 weights into 16 bits that do not lose what is smaller than a spacing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs
import torch

from trainwright.collectives import ShardSpec
from trainwright.collectives.random import Key
from trainwright.precision.errors import PrecisionError
from trainwright.precision.formats import FP16, Stochastic
from trainwright.precision.moments import round_to_bfloat16

# Elements that are rounded together on a CPU: what a cache holds with their draws.
_PIECE = 1 << 16


class WeightRounding(Protocol):
    """Writes float32 values into 16-bit weights, and reads them for the next step.

    Laws: values that the weight's dtype has are written as they are; over many steps the weight
    moves by what the values move; ranks with equal values, names and steps write equal weights.
    """

    def check(self, name: str, weight: torch.Tensor) -> None:
        """Raise PrecisionError unless this weight can be rounded."""
        ...

    def residual(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return what is kept beside a weight, at the beginning; None: nothing."""
        ...

    def read(self, weight: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the float32 values that the step starts from into ``out``."""
        ...

    def write(
        self,
        values: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
        name: str,
        update: int,
    ) -> None:
        """Round float32 values into the weight; ``update`` counts the steps before."""
        ...


@attrs.frozen
class StochasticRounding:
    """Rounds up with the probability that keeps the expected value.

    An element's draw follows from the seed, the parameter's name, the step and the element's place
    in the global tensor: replicas write the same weights, and a shard writes what that part of the
    whole gets. The codes are those of ``encode(values, rounding=Stochastic(Key(seed, name,
    update)))`` of `BF16` or `FP16`.

    Args:
        seed: of the run, the same on all ranks.
        shards: for parameters that are parts of larger ones, which parts; named as the optimizer
            names them. The draws go by the spec's own name and places.
    """

    seed: int = 0
    shards: Mapping[str, ShardSpec] = attrs.field(factory=dict)

    def check(self, name: str, weight: torch.Tensor) -> None:
        """Raise PrecisionError unless the weight is BF16 or FP16 and of its shard's size."""
        _check_dtype(name, weight)
        spec = self.shards.get(name)
        if spec is not None and spec.numel != weight.numel():
            raise PrecisionError(
                f"the shard of {name} has {spec.numel} elements, the weight {weight.numel()}; "
                "give the ShardSpec of what this rank holds"
            )

    def residual(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Keep nothing beside a weight."""
        return None

    def read(self, weight: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        """Start from the weight."""
        out.copy_(weight)

    def write(
        self,
        values: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
        name: str,
        update: int,
    ) -> None:
        """Round by draws."""
        spec = self.shards.get(name) or ShardSpec.full(name, weight.shape)
        key = Key(self.seed, spec.name, update)
        flat = values.reshape(-1)
        rounded = torch.empty_like(flat, dtype=weight.dtype)
        for at, box in spec.parts():
            step = _PIECE if flat.device.type == "cpu" else max(1, box.numel)
            for first in range(0, box.numel, step):
                last = min(first + step, box.numel)
                part = flat[at + first : at + last]
                where = Stochastic(key, spec.global_shape, box, first)
                if weight.dtype is torch.float16:
                    codes = FP16.encode(part, rounding=where)
                    rounded[at + first : at + last] = FP16.as_torch(codes)
                    continue
                draws = where.words(0, last - first, flat.device).bitwise_right_shift_(16)
                rounded[at + first : at + last] = round_to_bfloat16(part, draws.int())
        weight.copy_(rounded.view(weight.shape))


@attrs.frozen
class KahanCompensation:
    """Rounds to nearest, and keeps what that loses in a second tensor of the weight's dtype.

    Weight and compensation together have the digits of two 16-bit numbers; the next step starts
    from their sum. A compensation that would not round away, as after another weight was put into
    the model, is dropped.
    """

    def check(self, name: str, weight: torch.Tensor) -> None:
        """Raise PrecisionError unless the weight is BF16 or FP16."""
        _check_dtype(name, weight)

    def residual(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return zeros."""
        return torch.zeros_like(weight, requires_grad=False)

    def read(self, weight: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        """Start from the weight and what it lacks."""
        assert residual is not None
        torch.add(weight.float(), residual.float(), out=out)
        stale = out.to(weight.dtype) != weight
        out.copy_(torch.where(stale, weight.float(), out))

    def write(
        self,
        values: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
        name: str,
        update: int,
    ) -> None:
        """Round to nearest, and what is lost once more."""
        assert residual is not None
        weight.copy_(values)
        lost = (values - weight.float()).nan_to_num_(0.0, 0.0, 0.0)
        residual.copy_(lost)


def _check_dtype(name: str, weight: torch.Tensor) -> None:
    if weight.dtype not in (torch.bfloat16, torch.float16):
        raise PrecisionError(
            f"{name} must be bfloat16 or float16 to be rounded, got {weight.dtype}"
        )
