"""Which implementation computes attention between blocks, chosen by what the tensors are."""

# Shapes: B batch, H query heads, K key/value heads, S queries, T keys, E size of a head.

from __future__ import annotations

from typing import Protocol

import torch

from trainwright.sharding.context.chunked import ChunkedKernel

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Kernel(Protocol):
    """Attention of queries to keys, all of them or (``causal``, S = T) those up to their place.

    No tensor is empty. Each key/value head serves H / K neighbouring query heads.
    """

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output [B, H, S, E] and log-sum-exp [B, H, S], that in at least float32."""
        ...

    def backward(
        self,
        grad_out: torch.Tensor,
        inputs: Gradients,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """Return this block's terms of the gradients of q, k and v.

        Args:
            grad_out: Gradient of the output.
            inputs: q, k and v of the block.
            out: The output over all blocks, not this one's alone; so with ``lse``.
            lse: The log-sum-exp over all blocks.
            causal: As in ``forward``.
            scale: As in ``forward``.
        """
        ...


class CpuFlashKernel:
    """PyTorch's fused attention for the CPU; float64, float32, bfloat16, float16.

    It returns 0.0 as the log-sum-exp of a query that sees no key, ends the process where a tensor
    is empty, and misreads heads whose elements are not neighbours. Spans are made so that neither
    of the first is asked of it; heads are copied where they must be.
    """

    name = "cpu_flash"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_with_dense_heads, (q, k, v)), 0.0, causal, scale=scale
        )
        return out, lse

    def backward(
        self,
        grad_out: torch.Tensor,
        inputs: Gradients,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See `Kernel.backward`."""
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _with_dense_heads(grad_out),
            *map(_with_dense_heads, inputs),
            out,
            lse,
            0.0,
            causal,
            scale=scale,
        )
        return found[0], found[1], found[2]


class CudaFlashKernel:
    """PyTorch's fused attention for CUDA; bfloat16 and float16. Not run on a GPU by our tests."""

    name = "cuda_flash"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            *map(_with_dense_heads, (q, k, v)), 0.0, causal, False, scale=scale
        )
        return found[0], found[1]

    def backward(
        self,
        grad_out: torch.Tensor,
        inputs: Gradients,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See `Kernel.backward`."""
        # Without dropout the state of the generator is not read; lengths are those of the tensors.
        state = torch.zeros(2, dtype=torch.uint64, device=grad_out.device)
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            _with_dense_heads(grad_out),
            *map(_with_dense_heads, inputs),
            out,
            lse.contiguous(),
            None,
            None,
            inputs[0].shape[2],
            inputs[1].shape[2],
            0.0,
            causal,
            state,
            state[:0],
            scale=scale,
        )
        return found[0], found[1], found[2]


def choose_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Kernel:
    """Return what computes attention of these tensors; its ``name`` says which.

    Returns:
        ``cpu_flash`` or ``cuda_flash`` where PyTorch's fused kernels take the tensors, else
        ``chunked``: plain products of chunks, exact and never quadratic in memory.
    """
    same_heads = q.shape[-1] == v.shape[-1]
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if q.device.type == "cpu" and same_heads and q.dtype in floats:
        return CpuFlashKernel()
    if q.device.type == "cuda" and same_heads and _fits_cuda_flash(q):
        return CudaFlashKernel()
    return ChunkedKernel()


def _with_dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last dim has its elements side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _fits_cuda_flash(q: torch.Tensor) -> bool:
    if not torch.backends.cuda.is_flash_attention_available():
        return False
    is_recent = torch.cuda.get_device_capability(q.device) >= (8, 0)
    size = q.shape[-1]
    return is_recent and q.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 <= size <= 256
