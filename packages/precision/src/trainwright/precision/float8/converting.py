"""Putting FP8 products into the linear layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import attrs
from torch import nn

from trainwright.precision.errors import PrecisionError

from .choosing import Chosen, Pattern, choose_layers
from .linear import Float8Linear
from .protocol import Recipe, TakesProducts
from .roles import Scope
from .state import Float8State


def convert_linears(
    model: nn.Module,
    recipe: Recipe,
    patterns: Iterable[Pattern] | Callable[[str, nn.Module], bool] = ("*",),
    *,
    keep: Iterable[Pattern] = (),
    keep_ends: bool | tuple[bool, bool] = True,
    scope: Scope | Callable[[str], Scope] | None = None,
) -> Float8State:
    """Give linear layers FP8 products, in place.

    Layers whose class is `torch.nn.Linear` itself are replaced by `Float8Linear`: a subclass may
    compute something else. Layers that take products (`TakesProducts`), as those of
    `trainwright.sharding.tensor` do, stay and are given theirs; over which ranks their features are
    cut they say themselves. Parameters stay the same objects under the same names, so that
    optimizers, ties and state dicts keep hold of them. A module that reads its child's weight past
    the child's forward, as `torch.nn.MultiheadAttention` does, multiplies as before. Whatever looks
    for layers, such as units of sharded data parallelism, is best set up afterwards.

    Args:
        model: whose layers are changed; no `torch.nn.Linear` itself.
        recipe: how operands are scaled.
        patterns: names of layers to change; a string is matched by ``fnmatch`` against the whole
            dotted name (``*`` crosses dots), a compiled regular expression by ``fullmatch``. Or
            what says of a name and a layer whether it is to be changed.
        keep: names of layers that are left, whatever ``patterns`` say.
        keep_ends: whether the first and the last linear layer of the model, in the order of
            ``named_modules``, are left: they bear fewer bits badly. A pair says it of each: a stage
            of a pipeline may have the first, the last or neither.
        scope: over which ranks tokens and plain layers are cut, or what says it of a layer's name;
            None: not. Of a layer that says itself how its features are cut, ``tokens`` alone is
            read: the ranks that hold other tokens once it has gathered its input.

    Returns:
        What remembers their scales; with `Delayed`, call its ``end_step`` once a step. Each stage
        of a pipeline has its own.

    Raises:
        PrecisionError: a pattern matches nothing, no layer is left to change, a part of a weight
            ends within a block, or a scope cuts features of a layer that says it itself.
            Nothing is changed then.
    """
    if isinstance(model, nn.Linear):
        raise PrecisionError(
            "the model is a linear layer itself, which cannot be replaced in place; convert the "
            "module that holds it"
        )
    chosen = choose_layers(model, patterns, keep, keep_ends)
    scopes = {name: _scope_of(scope, name, layer) for name, layer in chosen.items()}
    state = Float8State(recipe, scopes)
    made: dict[nn.Linear, Float8Linear] = {}
    given: list[tuple[TakesProducts, str]] = []
    for name, layer in chosen.items():
        if isinstance(layer, nn.Linear):
            made[layer] = Float8Linear(layer, state.products[name])
        else:
            state.products[name].check_weight(_shape_of(layer))
            given.append((layer, name))
    for taker, name in given:
        taker.products = state.products[name]
    _replace(model, made)
    return state


def _replace(model: nn.Module, made: Mapping[nn.Linear, Float8Linear]) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, nn.Linear) and child in made:
                # A layer under several names is replaced under each.
                parent._modules[name] = made[child]


def _scope_of(scope: Scope | Callable[[str], Scope] | None, name: str, layer: Chosen) -> Scope:
    found = Scope() if scope is None else scope if isinstance(scope, Scope) else scope(name)
    if isinstance(layer, nn.Linear):
        return found
    if found.in_features or found.out_features:
        raise PrecisionError(
            f"layer {name} says itself over which ranks its features are cut; give it a scope "
            f"of tokens only"
        )
    cuts = layer.feature_cuts()
    in_comm, in_ranges = cuts.get("in_features", (None, None))
    out_comm, out_ranges = cuts.get("out_features", (None, None))
    return attrs.evolve(
        found,
        in_features=in_comm,
        out_features=out_comm,
        in_ranges=in_ranges,
        out_ranges=out_ranges,
    )


def _shape_of(layer: TakesProducts) -> tuple[int, int]:
    """Return [O, I] of what a rank multiplies, however it is stored."""
    cuts = layer.feature_cuts()
    sizes = []
    for name, whole in (("out_features", layer.out_features), ("in_features", layer.in_features)):
        comm, ranges = cuts.get(name, (None, None))
        of_rank = [(0, whole)] if comm is None or ranges is None else ranges.ranges[comm.rank]
        sizes.append(sum(stop - start for start, stop in of_rank))
    return sizes[0], sizes[1]
