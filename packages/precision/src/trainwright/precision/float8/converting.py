"""Putting FP8 products into the linear layers of a model."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping

from torch import nn

from trainwright.precision.errors import PrecisionError

from .linear import Float8Linear
from .protocol import Recipe
from .roles import Scope
from .state import Float8State

Pattern = str | re.Pattern[str]


def convert_linears(
    model: nn.Module,
    recipe: Recipe,
    patterns: Iterable[Pattern] = ("*",),
    *,
    keep: Iterable[Pattern] = (),
    keep_ends: bool = True,
    scope: Scope | Callable[[str], Scope] | None = None,
) -> Float8State:
    """Replace linear layers by `Float8Linear`, in place.

    Parameters stay the same objects under the same names, so that optimizers, ties and state dicts
    keep hold of them. Only layers whose class is `torch.nn.Linear` itself are replaced: a subclass
    may compute something else. A module that reads its child's weight past the child's forward,
    as `torch.nn.MultiheadAttention` does, multiplies as before.

    Args:
        model: whose layers are replaced; not a linear layer itself.
        recipe: how operands are scaled.
        patterns: names of layers to replace; a string is matched by ``fnmatch`` against the whole
            dotted name (``*`` crosses dots), a compiled regular expression by ``fullmatch``.
        keep: names of layers that are left, whatever ``patterns`` say.
        keep_ends: whether the first and the last linear layer of the model, in the order of
            ``named_modules``, are left: they bear fewer bits badly. False where the model is a
            stage that has neither.
        scope: over which ranks layers are cut, or what says it of a layer's name; None: not.

    Returns:
        What remembers their scales; with `Delayed`, call its ``end_step`` once a step.

    Raises:
        PrecisionError: a pattern matches nothing, or no layer is left to replace.
    """
    layers = _layers(model)
    plain = {name: layer for name, layer in layers.items() if type(layer) is nn.Linear}
    wanted, left = _as_patterns("patterns", patterns), _as_patterns("keep", keep)
    _check_patterns("patterns", wanted, plain)
    _check_patterns("keep", left, layers)
    ends = {name for name in (*list(layers)[:1], *list(layers)[-1:]) if keep_ends}
    chosen = {
        name: layer
        for name, layer in plain.items()
        if _matches(wanted, name) and not _matches(left, name) and name not in ends
    }
    if not chosen:
        kept = f"; keep_ends=True keeps {', '.join(sorted(ends))}" if ends else ""
        raise PrecisionError(f"nothing is left to replace of {len(plain)} linear layers{kept}")
    scopes = {name: _scope_of(scope, name) for name in chosen}
    state = Float8State(recipe, scopes)
    made = {layer: Float8Linear(layer, state.products[name]) for name, layer in chosen.items()}
    _replace(model, made)
    return state


def _layers(model: nn.Module) -> dict[str, nn.Linear]:
    if isinstance(model, nn.Linear):
        raise PrecisionError(
            "the model is a linear layer itself, which cannot be replaced in place; convert the "
            "module that holds it"
        )
    kinds = (nn.Linear, Float8Linear)
    return {name: m for name, m in model.named_modules() if type(m) in kinds}


def _replace(model: nn.Module, made: Mapping[nn.Linear, Float8Linear]) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, nn.Linear) and child in made:
                # A layer under several names is replaced under each.
                parent._modules[name] = made[child]


def _scope_of(scope: Scope | Callable[[str], Scope] | None, name: str) -> Scope:
    if scope is None:
        return Scope()
    return scope if isinstance(scope, Scope) else scope(name)


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
