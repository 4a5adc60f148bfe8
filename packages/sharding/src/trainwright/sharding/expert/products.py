"""One product an expert: each block of rows times that expert's matrix."""

# Shapes: R rows, I in_features, O out_features, L local experts.

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F

_ALIGNED_BYTES = 16


def multiply_experts(
    rows_RI: torch.Tensor, weights_LOI: torch.Tensor, sizes: Sequence[int]
) -> torch.Tensor:
    """Return each block of rows times its expert's matrix transposed [R, O].

    One grouped product where the device has it (bfloat16 on CUDA) and each expert has one block,
    else one product a block, into one output. An expert without rows costs nothing and has a
    gradient of zero. A schedule that takes backwards apart can call ``weight_gradient`` later.

    Args:
        rows_RI: The rows, block after block.
        weights_LOI: A matrix an expert.
        sizes: Rows of each block, which sum to R; block i is of expert i modulo L.
    """
    rows_RI, weights_LOI = _as_autocast(rows_RI), _as_autocast(weights_LOI)
    args = (rows_RI, weights_LOI, tuple(sizes))
    if torch.overrides.has_torch_function(args[:2]):
        return cast(
            torch.Tensor,
            torch.overrides.handle_torch_function(_ExpertProducts.apply, args[:2], *args),
        )
    return cast(torch.Tensor, _ExpertProducts.apply(*args))  # type: ignore[no-untyped-call]


def has_grouped_products(rows: torch.Tensor, weights: torch.Tensor) -> bool:
    """Return whether one kernel multiplies all blocks of these operands."""
    on_device = all(t.is_cuda and t.dtype == torch.bfloat16 for t in (rows, weights))
    return on_device and all(
        size * weights.element_size() % _ALIGNED_BYTES == 0 for size in weights.shape[1:]
    )


class _ExpertProducts(torch.autograd.Function):
    weights: ClassVar[tuple[int, ...]] = (1,)

    @staticmethod
    def forward(
        ctx: Any, rows_RI: torch.Tensor, weights_LOI: torch.Tensor, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_RI, weights_LOI)
        ctx.sizes = sizes
        ctx.shape = weights_LOI.shape
        ctx.is_grouped = _is_grouped(rows_RI, weights_LOI, sizes)
        return _outputs(rows_RI, weights_LOI.transpose(1, 2), sizes)

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        # Read once: a recomputed region unpacks what was saved a single time.
        rows_RI, weights_LOI = ctx.saved_tensors
        of_rows = _gradient_of_rows(ctx, gradient, weights_LOI)
        return of_rows, _gradient_of_weights(ctx, gradient, rows_RI), None

    @staticmethod
    def input_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        _, weights_LOI = ctx.saved_tensors
        return _gradient_of_rows(ctx, gradient, weights_LOI), None, None

    @staticmethod
    def weight_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None]:
        return (_gradient_of_weights(ctx, gradient, ctx.saved_tensors[0]),)


def _gradient_of_rows(
    ctx: Any, gradient: torch.Tensor, weights_LOI: torch.Tensor
) -> torch.Tensor | None:
    if not ctx.needs_input_grad[0]:
        return None
    if torch.is_grad_enabled():
        return multiply_experts(gradient, weights_LOI.transpose(1, 2), ctx.sizes)
    return _outputs(gradient, weights_LOI, ctx.sizes)


def _gradient_of_weights(
    ctx: Any, gradient: torch.Tensor, rows_RI: torch.Tensor
) -> torch.Tensor | None:
    if not ctx.needs_input_grad[1]:
        return None
    blocks = _blocks(ctx.sizes, gradient, rows_RI)
    if torch.is_grad_enabled():
        terms = torch.stack([ours.t() @ rows for ours, rows in blocks])
        return terms.view(-1, *ctx.shape).sum(0)
    if ctx.is_grouped:
        ends = _ends(ctx.sizes, gradient.device)
        return F.grouped_mm(gradient.contiguous().t(), rows_RI, offs=ends)
    found = rows_RI.new_empty(ctx.shape)  # the weights themselves may have been released
    local = found.shape[0]
    for index, (ours, rows) in enumerate(blocks):
        result = found[index % local]
        if index < local:
            torch.mm(ours.t(), rows, out=result)
        elif rows.shape[0]:
            torch.addmm(result, ours.t(), rows, out=result)
    return found


def _outputs(
    rows_RI: torch.Tensor, weights_LIO: torch.Tensor, sizes: Sequence[int]
) -> torch.Tensor:
    if _is_grouped(rows_RI, weights_LIO, sizes):
        return F.grouped_mm(rows_RI.contiguous(), weights_LIO, offs=_ends(sizes, rows_RI.device))
    output = rows_RI.new_empty((rows_RI.shape[0], weights_LIO.shape[2]))
    blocks = _blocks(sizes, rows_RI, output)
    for (rows, result), weight in zip(blocks, cycle(weights_LIO.unbind(0)), strict=False):
        if rows.shape[0]:
            torch.mm(rows, weight, out=result)
    return output


def _is_grouped(rows: torch.Tensor, weights: torch.Tensor, sizes: Sequence[int]) -> bool:
    return len(sizes) == weights.shape[0] and has_grouped_products(rows, weights)


def _blocks(sizes: Sequence[int], *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Return each block's rows of all tensors."""
    return list(zip(*(torch.split(tensor, list(sizes)) for tensor in tensors), strict=True))


def _ends(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    counted = torch.tensor(sizes, dtype=torch.int32)
    return counted.cumsum(0, dtype=torch.int32).to(device, non_blocking=True)


def _as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast as autocast would for a product, so that the backward sees what was multiplied."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))
