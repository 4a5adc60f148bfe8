"""The header message: what a transfer holds, as a few int64 numbers.

Layout: version mark, number of ints in all, form, number of tensors, how many of them are skips;
for each tensor its dtype, needs_grad, number of dims and sizes; for a dict, each key as its length
in bytes and its UTF-8 bytes, eight to an int; each skip's name likewise. The first `FIRST_INTS`
travel in a message of fixed size; only what does not fit there follows in a second one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from trainwright.pipeline_schedules.execute.boundary import Crossing, Form, TensorSpec
from trainwright.pipeline_schedules.execute.errors import BoundaryError

FIRST_INTS = 32
"""Length of the first message; enough for a tuple of three or four usual tensors."""

_MARK = 0x7472_7701
_FORMS = ("tensor", "tuple", "dict")
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
_NUMBER_OF_DTYPE = {dtype: number for number, dtype in enumerate(_DTYPES)}


def encode(crossing: Crossing) -> list[int]:
    """Write a crossing as ints: at least `FIRST_INTS`, padded with zeros.

    Raises:
        BoundaryError: A dtype that has no number here.
    """
    form = crossing.form
    words = [_FORMS.index(form.kind), len(crossing.specs), len(form.skips)]
    for spec in crossing.specs:
        if spec.dtype not in _NUMBER_OF_DTYPE:
            raise BoundaryError(f"a tensor of dtype {spec.dtype} cannot cross a stage boundary")
        words += [_NUMBER_OF_DTYPE[spec.dtype], int(spec.needs_grad), len(spec.shape)]
        words += spec.shape
    for name in (*form.keys, *form.skips):
        words += _pack(name)
    ints = [_MARK, len(words) + 2, *words]
    return ints + [0] * (FIRST_INTS - len(ints))


def missing_ints(first: Sequence[int]) -> int:
    """How many ints follow in a second message.

    Raises:
        BoundaryError: The message is not a header, so the sender declared this boundary.
    """
    if first[0] != _MARK:
        raise BoundaryError(
            "expected the header of a stage boundary but got other data; "
            "every rank must be given the same BoundarySpec"
        )
    return max(0, first[1] - FIRST_INTS)


def decode(ints: Sequence[int]) -> Crossing:
    """Read what `encode` wrote."""
    words = iter(ints[2:])
    kind = _FORMS[next(words)]
    number, num_skips = next(words), next(words)
    specs = tuple(_read_spec(words) for _ in range(number))
    num_keys = number - num_skips if kind == "dict" else 0
    keys = tuple(_unpack(words) for _ in range(num_keys))
    skips = tuple(_unpack(words) for _ in range(num_skips))
    return Crossing(Form(kind, keys, skips), specs)


def _read_spec(words: Iterator[int]) -> TensorSpec:
    dtype = _DTYPES[next(words)]
    needs_grad = bool(next(words))
    shape = [next(words) for _ in range(next(words))]
    return TensorSpec(shape, dtype, needs_grad)


def _pack(text: str) -> list[int]:
    data = text.encode()
    padded = data + bytes(-len(data) % 8)
    eights = (padded[at : at + 8] for at in range(0, len(padded), 8))
    return [len(data), *(int.from_bytes(eight, "little", signed=True) for eight in eights)]


def _unpack(words: Iterator[int]) -> str:
    length = next(words)
    eights = (next(words).to_bytes(8, "little", signed=True) for _ in range(-(-length // 8)))
    return b"".join(eights)[:length].decode()
