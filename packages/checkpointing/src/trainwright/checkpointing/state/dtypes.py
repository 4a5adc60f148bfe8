"""Names of dtypes in files, and tensors as little-endian bytes."""

from __future__ import annotations

import sys

import torch

from trainwright.checkpointing.errors import NotAvailableYetError

# What the safetensors format has a name for.
_STANDARD = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# What it has none for: stored as bytes, with one more dim of the element's size.
_RAW = (torch.complex128, torch.complex32, torch.float4_e2m1fn_x2)

_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in (*_STANDARD, *_RAW)}


def is_storable(dtype: torch.dtype) -> bool:
    """Whether tensors of ``dtype`` can be written."""
    return dtype in _STANDARD or dtype in _RAW


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` in PyTorch, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: object) -> torch.dtype | None:
    """Return the dtype of that name, or None if there is none that can be stored."""
    return _BY_NAME.get(name) if isinstance(name, str) else None


def file_type(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the safetensors name and shape under which such a tensor is stored."""
    if dtype in _STANDARD:
        return _STANDARD[dtype], shape
    return "U8", (*shape, dtype.itemsize)


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements in row-major order as bytes; a view where the tensor allows one."""
    require_little_endian()
    host = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return flat_bytes(host).numpy().data


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as a uint8 view that shares its version counter."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8)


def require_little_endian() -> None:
    """Raise where the processor's byte order is not that of the files."""
    if sys.byteorder != "little":
        raise NotAvailableYetError("checkpoints on big-endian processors are not available yet")
