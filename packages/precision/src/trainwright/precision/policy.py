"""Which tensor has which dtype: a value that modules, reductions and optimizers read."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs
import torch
from torch import nn

from trainwright.precision.errors import NotAvailableError, PrecisionError
from trainwright.precision.float8 import Recipe
from trainwright.precision.kinds import KINDS, ModuleKind
from trainwright.precision.presets import find_preset

if TYPE_CHECKING:
    from trainwright.precision.casting import AppliedPolicy

Pattern = str | re.Pattern[str]

_FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_dtype(_: object, attribute: attrs.Attribute[torch.dtype], value: object) -> None:
    if value in _FORMATS:
        return
    rule = f"{attribute.name} must be one of {', '.join(map(str, _FORMATS))}, got {value!r}"
    if isinstance(value, torch.dtype) and value.is_floating_point:
        raise NotAvailableError(f"{rule}; FP8 products are asked for by a recipe")
    raise PrecisionError(rule)


def _pattern_tuple(patterns: Iterable[Pattern]) -> tuple[Pattern, ...]:
    if isinstance(patterns, str | re.Pattern):
        raise PrecisionError(
            f"keep_fp32 must be a sequence of patterns, got {patterns!r}; write ({patterns!r},)"
        )
    return tuple(patterns)


def _kind_tuple(kinds: Iterable[ModuleKind]) -> tuple[ModuleKind, ...]:
    return tuple(kinds)


def _show_kinds(kinds: tuple[ModuleKind, ...]) -> str:
    return f"({', '.join(getattr(kind, '__name__', repr(kind)) for kind in kinds)})"


@attrs.frozen
class DtypePolicy:
    """The dtypes of one training run.

    The policy's own dtypes are a request and are applied as they stand. What is kept, by name or by
    kind, is only ever raised: it gets at least float32, and a float64 parameter stays float64.

    Args:
        parameter: dtype in which a module keeps its weights.
        compute: dtype of the products; inputs are cast to it, and weights where they differ.
        reduce: dtype in which gradients are summed over ranks.
        output: dtype of what the whole module returns.
        keep_fp32: names of parameters that stay in at least float32; a string is matched by
            ``fnmatch`` against the whole dotted name (``*`` crosses dots), a compiled regular
            expression by ``fullmatch``.
        keep_kinds: kinds of modules that `apply` keeps in at least float32: norms, softmax, losses
            and routers, found by structure; any function from a model to some of its modules is a
            kind. Rules by name, such as `parameter_dtype`, see no modules and leave it out.
        recipe: of `trainwright.precision.float8`, with which `apply` gives linear layers FP8
            products; what is kept, and the first and the last linear layer, get none. None: all
            products are in ``compute``.

    Raises:
        PrecisionError: a dtype is not a floating-point format of this package.
    """

    parameter: torch.dtype = attrs.field(validator=_check_dtype)
    compute: torch.dtype = attrs.field(validator=_check_dtype)
    reduce: torch.dtype = attrs.field(validator=_check_dtype)
    output: torch.dtype = attrs.field(validator=_check_dtype)
    keep_fp32: tuple[Pattern, ...] = attrs.field(default=(), converter=_pattern_tuple)
    keep_kinds: tuple[ModuleKind, ...] = attrs.field(
        default=KINDS, converter=_kind_tuple, repr=_show_kinds
    )
    recipe: Recipe | None = None

    def keeps(self, name: str) -> bool:
        """Say whether the parameter called ``name`` stays in at least float32."""
        return any(_matches(pattern, name) for pattern in self.keep_fp32)

    def parameter_dtype(self, name: str, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a module keeps this parameter.

        Integer parameters keep theirs. Wherever a rule "name and parameter to dtype" is wanted,
        this bound method is one.
        """
        if not parameter.is_floating_point():
            return parameter.dtype
        return self.raised(parameter.dtype) if self.keeps(name) else self.parameter

    def compute_dtype(self, name: str, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype in which this parameter enters products, by its name."""
        if not parameter.is_floating_point():
            return parameter.dtype
        return self.raised(parameter.dtype) if self.keeps(name) else self.compute

    def raised(self, dtype: torch.dtype) -> torch.dtype:
        """Return the widest of ``dtype``, float32 and the policy's parameter dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        return torch.promote_types(wide, self.parameter)

    def check_patterns(self, names: Iterable[str]) -> None:
        """Make sure that every pattern matches one of ``names``.

        Raises:
            PrecisionError: a pattern matches nothing; the message holds the nearest names.
        """
        known = list(names)
        for pattern in self.keep_fp32:
            if any(_matches(pattern, name) for name in known):
                continue
            text = pattern if isinstance(pattern, str) else pattern.pattern
            near = difflib.get_close_matches(text.strip("*"), known, n=3, cutoff=0.3) or known[:3]
            raise PrecisionError(
                f"keep_fp32 pattern {text!r} matches none of {len(known)} parameters; "
                f"a pattern must match a whole name, such as {', '.join(near) or '(none)'}"
            )

    def apply(self, module: nn.Module) -> AppliedPolicy:
        """Cast ``module`` for a plain loop, in place; see `AppliedPolicy` for what is done.

        Raises:
            PrecisionError: a pattern matches nothing, one module would mix dtypes, or there is a
                recipe and no linear layer for it.
        """
        from trainwright.precision.casting import apply_policy

        return apply_policy(self, module)

    def autocast(self, device_type: str = "cpu") -> torch.autocast:
        """Return a ``torch.autocast`` in ``compute`` that keeps no copies of weights.

        PyTorch's own keeps the 16-bit copy of a weight to the end of the region, also where the
        weight changes within: it then computes with the old one. Here each product casts anew, so
        that a region may span optimizer steps. With 32 and 64 bits it turns an outer one off. What
        stays wide is what PyTorch lists; use `apply`, alone or inside, for what the policy keeps,
        and for its FP8 products.

        Args:
            device_type: such as "cpu" or "cuda".
        """
        narrow = self.compute.itemsize == 2
        dtype = self.compute if narrow else None
        return torch.autocast(device_type, dtype=dtype, enabled=narrow, cache_enabled=False)


def policy(
    name: str,
    *,
    keep_fp32: Iterable[Pattern] = (),
    keep_kinds: Iterable[ModuleKind] = KINDS,
) -> DtypePolicy:
    """Return the preset called ``name``.

    Args:
        name: "float32", "float64", "bfloat16" or "float16", also spelled as in "fp32" and "bf16";
            or "fp8-delayed", "fp8-current", "fp8-row", "fp8-block" or "fp8-mx", which are
            "bfloat16" with a recipe for the products of linear layers. Presets of 16 bits and fewer
            reduce and return in float32.
        keep_fp32: patterns of parameters that stay in at least float32.
        keep_kinds: kinds of modules that do, when the policy is applied to a module.

    Raises:
        PrecisionError: no preset has that name.
    """
    found = find_preset(name)
    kept = _pattern_tuple(keep_fp32), _kind_tuple(keep_kinds)
    return DtypePolicy(found.narrow, found.narrow, found.wide, found.wide, *kept, found.recipe)


def _matches(pattern: Pattern, name: str) -> bool:
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern.fullmatch(name) is not None
