"""Uniform, normal and Bernoulli draws of global tensors, boxes of them and single places."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.collectives.box import Box
from trainwright.collectives.errors import UsageError

from .elements import Pair, Transform, draw_box, draw_places, to_unit
from .gaussian import transform_pair
from .key import Key


def uniform(
    key: Key,
    shape: Sequence[int],
    *,
    box: Box | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return uniform numbers in [0, 1).

    Args:
        key: Which random tensor.
        shape: Shape of the global tensor.
        box: The part of it to compute; None: all of it.
        dtype: A floating-point dtype. The float64 number is rounded to it, or to the largest number
            below one where that would be one.
        device: Where to compute and return it.

    Returns:
        Tensor of ``box.shape``.

    Raises:
        UsageError: The box is not within ``shape``, or the dtype is not floating-point.
    """
    return draw_box(key, shape, box, dtype, device, _to_uniform(dtype))


def normal(
    key: Key,
    shape: Sequence[int],
    *,
    mean: float = 0.0,
    std: float = 1.0,
    box: Box | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return normal numbers, computed and scaled in float64 and rounded once.

    Args:
        key: Which random tensor.
        shape: Shape of the global tensor.
        mean: Mean of the distribution.
        std: Standard deviation.
        box: The part of the global tensor to compute; None: all of it.
        dtype: A floating-point dtype.
        device: Where to compute and return it.

    Returns:
        Tensor of ``box.shape``.

    Raises:
        UsageError: The box is not within ``shape``, the dtype is not floating-point, or ``std`` is
            negative.
    """
    return draw_box(key, shape, box, dtype, device, _to_normal(dtype, mean, std))


def bernoulli(
    key: Key,
    shape: Sequence[int],
    probability: float,
    *,
    box: Box | None = None,
    dtype: torch.dtype = torch.bool,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return one with ``probability`` and zero otherwise; never and always at 0 and 1.

    Args:
        key: Which random tensor.
        shape: Shape of the global tensor.
        probability: Between 0 and 1.
        box: The part of the global tensor to compute; None: all of it.
        dtype: Any dtype.
        device: Where to compute and return it.

    Returns:
        Tensor of ``box.shape``, true where `uniform` is below ``probability`` in float64.

    Raises:
        UsageError: The box is not within ``shape``, or the probability not within 0 and 1.
    """
    if not 0.0 <= probability <= 1.0:
        raise UsageError(f"probability must be between 0 and 1, got {probability}")

    def below(bits0: torch.Tensor, bits1: torch.Tensor) -> Pair:
        return to_unit(bits0) < probability, to_unit(bits1) < probability

    return draw_box(key, shape, box, dtype, device, below)


def uniform_at(
    key: Key, indices: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the elements of `uniform` at flat positions in the global tensor.

    Args:
        key: Which random tensor.
        indices: Int64 tensor of any shape with row-major positions, none negative.
        dtype: A floating-point dtype.

    Returns:
        Tensor of the shape and on the device of ``indices``.

    Raises:
        UsageError: The dtype of ``indices`` is not int64, or ``dtype`` is not floating-point.
    """
    return draw_places(key, indices, dtype, _to_uniform(dtype))


def normal_at(
    key: Key,
    indices: torch.Tensor,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the elements of `normal` at flat positions in the global tensor.

    Args:
        key: Which random tensor.
        indices: Int64 tensor of any shape with row-major positions, none negative.
        mean: Mean of the distribution.
        std: Standard deviation.
        dtype: A floating-point dtype.

    Returns:
        Tensor of the shape and on the device of ``indices``.

    Raises:
        UsageError: The dtype of ``indices`` is not int64, ``dtype`` is not floating-point, or
            ``std`` is negative.
    """
    return draw_places(key, indices, dtype, _to_normal(dtype, mean, std))


def _to_uniform(dtype: torch.dtype) -> Transform:
    _check_floating(dtype)
    # Rounding to nearest would give one for the numbers closest to it.
    largest = 1.0 - torch.finfo(dtype).eps / 2

    def transform(bits0: torch.Tensor, bits1: torch.Tensor) -> Pair:
        return to_unit(bits0).clamp_(max=largest), to_unit(bits1).clamp_(max=largest)

    return transform


def _to_normal(dtype: torch.dtype, mean: float, std: float) -> Transform:
    _check_floating(dtype)
    if not std >= 0.0:
        raise UsageError(f"std must not be negative, got {std}")

    def transform(bits0: torch.Tensor, bits1: torch.Tensor) -> Pair:
        even, odd = transform_pair(bits0 >> 10, bits1 >> 10)
        return even.mul_(std).add_(mean), odd.mul_(std).add_(mean)

    return transform


def _check_floating(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise UsageError(f"the dtype must be floating-point, got {dtype}")
