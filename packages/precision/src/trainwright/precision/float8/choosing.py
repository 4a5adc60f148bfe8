"""Which linear layers of a model are meant by names, patterns and places."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from torch import nn

from trainwright.precision.errors import PrecisionError

from .linear import Float8Linear
from .protocol import TakesProducts

Pattern = str | re.Pattern[str]
Chosen: TypeAlias = nn.Linear | TakesProducts


def choose_layers(
    model: nn.Module,
    patterns: Iterable[Pattern] | Callable[[str, nn.Module], bool],
    keep: Iterable[Pattern],
    keep_ends: bool | tuple[bool, bool],
) -> dict[str, Chosen]:
    """Return the layers to change by name; arguments as of `convert_linears`.

    Raises:
        PrecisionError: a pattern matches nothing, or no layer is left.
    """
    layers = _layers(model)
    plain = {name: layer for name, layer in layers.items() if _is_plain(layer)}
    is_wanted = _rule(patterns, plain)
    left = _as_patterns("keep", keep)
    _check_patterns("keep", left, layers)
    first, last = keep_ends if isinstance(keep_ends, tuple) else (keep_ends, keep_ends)
    names = list(layers)
    ends = {*(names[:1] if first else ()), *(names[-1:] if last else ())}
    chosen = {
        name: layer
        for name, layer in plain.items()
        if is_wanted(name) and not _matches(left, name) and name not in ends
    }
    if not chosen:
        kept = f"; keep_ends={keep_ends} keeps {', '.join(sorted(ends))}" if ends else ""
        raise PrecisionError(f"nothing is left to replace of {len(plain)} linear layers{kept}")
    return chosen


def _layers(model: nn.Module) -> dict[str, Chosen]:
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Float8Linear) or isinstance(module, TakesProducts)
    }


def _is_plain(layer: Chosen) -> bool:
    return type(layer) is nn.Linear if isinstance(layer, nn.Linear) else layer.products is None


def _rule(
    patterns: Iterable[Pattern] | Callable[[str, nn.Module], bool], plain: Mapping[str, Chosen]
) -> Callable[[str], bool]:
    if callable(patterns):
        says = patterns

        def is_wanted(name: str) -> bool:
            layer = plain[name]
            assert isinstance(layer, nn.Module)
            return bool(says(name, layer))

        return is_wanted
    wanted = _as_patterns("patterns", patterns)
    _check_patterns("patterns", wanted, plain)
    return lambda name: _matches(wanted, name)


def _as_patterns(what: str, patterns: Iterable[Pattern]) -> tuple[Pattern, ...]:
    if isinstance(patterns, str | re.Pattern):
        raise PrecisionError(
            f"{what} must be a sequence of patterns, got {patterns!r}; write ({patterns!r},)"
        )
    return tuple(patterns)


def _check_patterns(what: str, patterns: tuple[Pattern, ...], names: Iterable[str]) -> None:
    known = list(names)
    for pattern in patterns:
        if any(_matches((pattern,), name) for name in known):
            continue
        text = pattern if isinstance(pattern, str) else pattern.pattern
        near = difflib.get_close_matches(text.strip("*"), known, n=3, cutoff=0.3) or known[:3]
        raise PrecisionError(
            f"{what} pattern {text!r} matches none of {len(known)} linear layers; a pattern must "
            f"match a whole name, such as {', '.join(near) or '(none)'}"
        )


def _matches(patterns: Iterable[Pattern], name: str) -> bool:
    return any(
        fnmatch.fnmatchcase(name, pattern)
        if isinstance(pattern, str)
        else pattern.fullmatch(name) is not None
        for pattern in patterns
    )
