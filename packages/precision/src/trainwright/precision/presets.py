"""The policies that have a name: data, and the other spellings of the names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

import attrs
import torch

from trainwright.precision.errors import PrecisionError
from trainwright.precision.float8 import Blockwise, Current, Delayed, Mx, PerRow, Recipe


@attrs.frozen
class Preset:
    """What a name stands for.

    Args:
        narrow: dtype of parameters and products.
        wide: dtype of reductions and of the module's output.
        recipe: how the operands of linear layers' products become FP8; None: they do not.
    """

    narrow: torch.dtype
    wide: torch.dtype
    recipe: Recipe | None = None


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "float32": Preset(torch.float32, torch.float32),
        "float64": Preset(torch.float64, torch.float64),
        "bfloat16": Preset(torch.bfloat16, torch.float32),
        "float16": Preset(torch.float16, torch.float32),
        "fp8-delayed": Preset(torch.bfloat16, torch.float32, Delayed()),
        "fp8-current": Preset(torch.bfloat16, torch.float32, Current()),
        "fp8-row": Preset(torch.bfloat16, torch.float32, PerRow()),
        "fp8-block": Preset(torch.bfloat16, torch.float32, Blockwise()),
        "fp8-mx": Preset(torch.bfloat16, torch.float32, Mx()),
    }
)
"""Name of a preset: its dtypes, and its recipe for FP8 products."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "fp32": "float32",
        "float": "float32",
        "fp64": "float64",
        "double": "float64",
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
    }
)
"""Other spellings of names of presets."""


def find_preset(name: str) -> Preset:
    """Return the preset of this name, in either spelling.

    Raises:
        PrecisionError: there is none; the message holds the nearest name.
    """
    known = ALIASES.get(name, name)
    if known in PRESETS:
        return PRESETS[known]
    near = difflib.get_close_matches(str(name), [*PRESETS, *ALIASES], n=1, cutoff=0.0)
    raise PrecisionError(
        f"preset must be one of {', '.join(PRESETS)}, got {name!r}; did you mean {near[0]!r}?"
    )
