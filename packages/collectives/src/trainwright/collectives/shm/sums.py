"""Sums in rank order without fresh memory: what `arithmetic.combine` computes, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.collectives.arithmetic import CHUNK, combine
from trainwright.collectives.protocol import ReduceOp

_ADDED = (ReduceOp.SUM, ReduceOp.AVG)
_HALVES = (torch.bfloat16, torch.float16)


class Adder:
    """Adds large tensors through memory that it keeps; one thread at a time uses it."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, torch.Tensor] = {}

    def combine(
        self,
        outputs: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        op: ReduceOp,
        reduce_dtype: torch.dtype,
    ) -> None:
        """Write the combination of flat ``parts`` into each of the flat ``outputs``."""
        dtype = parts[0].dtype
        if op not in _ADDED or len(parts) < 2 or not dtype.is_floating_point:
            combine(outputs, parts, op, reduce_dtype)
            return
        numel = parts[0].numel()
        if numel <= CHUNK:
            self._add(outputs, parts, op, reduce_dtype)
            return
        for start in range(0, numel, CHUNK):
            cut = slice(start, start + CHUNK)
            self._add([out[cut] for out in outputs], [p[cut] for p in parts], op, reduce_dtype)

    def _add(
        self,
        outputs: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        op: ReduceOp,
        wide: torch.dtype,
    ) -> None:
        # An output may be one of the parts, so nothing but the last step writes outputs.
        first, *others = outputs
        dtype = parts[0].dtype
        is_sum = op is ReduceOp.SUM
        # PyTorch adds two numbers of 16 bits in float32 and rounds the sum once.
        is_pair = len(parts) == 2 and dtype in _HALVES and wide is torch.float32
        if is_sum and (is_pair or dtype is wide):
            total = parts[0]
            if len(parts) > 2:
                memory = self._scratch(wide, total.numel())
                torch.add(total, parts[1], out=memory)
                for part in parts[2:-1]:
                    memory.add_(part)
                total = memory
            torch.add(total, parts[-1], out=first)
        else:
            memory = self._scratch(wide, first.numel())
            memory.copy_(parts[0])
            for part in parts[1:]:
                memory.add_(part)
            if not is_sum:
                memory.div_(len(parts))
            first.copy_(memory)
        for other in others:
            other.copy_(first)

    def _scratch(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        memory = self._memory.get(dtype)
        if memory is None:
            with torch.inference_mode(False):
                memory = self._memory[dtype] = torch.empty(CHUNK, dtype=dtype)
        return memory[:numel]
