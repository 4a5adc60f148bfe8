"""Which changes a style asks of a module: checked here, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from trainwright.collectives import Communicator
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.arguments import Argument
from trainwright.sharding.tensor.changes import Attribute, Change, Hook, Placed, Replacement
from trainwright.sharding.tensor.dropout import DropoutPlace, PlacedDropout
from trainwright.sharding.tensor.layers import Made, make_embedding, make_linear
from trainwright.sharding.tensor.plan import REPLACING, Match
from trainwright.sharding.tensor.regions import (
    EnterRegion,
    FollowSequence,
    HearLength,
    JoinRegion,
    NoDropoutHere,
    Residual,
    SplitRegion,
)
from trainwright.sharding.tensor.styles import (
    Column,
    Dropout,
    Enter,
    HeadNorm,
    JoinSequence,
    KeyValue,
    NoDropout,
    Norm,
    Row,
    SequenceLength,
    SetAttribute,
    SplitSequence,
    Style,
    Vocab,
    Whole,
)


@attrs.frozen(eq=False)
class Setting:
    """What the changes of all modules have in common.

    Args:
        tp: The tensor-parallel ranks.
        residual: The activations between the shared parts.
        parents: By the id of a module, the modules that hold it and its name in each.
        entered: By id, the modules inside one with `Enter`.
        place: Step and samples of dropout masks.
    """

    tp: Communicator
    residual: Residual
    parents: Mapping[int, tuple[tuple[nn.Module, str], ...]]
    entered: Mapping[int, str]
    place: DropoutPlace | None


def changes_of(each: Match, setting: Setting) -> list[Change]:
    """Return the changes that a module's styles ask for, those that may refuse a step first.

    Raises:
        ShardingError: A style does not fit the module.
    """
    replaced = any(isinstance(style, (Column, KeyValue)) for style in each.styles)
    found: list[Change] = []
    for style in sorted(each.styles, key=_hook_order):
        if not (replaced and isinstance(style, Enter)):
            found += _changes(style, each, setting)
    return found


def _hook_order(style: Style) -> int:
    """Refusals first, then what others need to know."""
    return 0 if isinstance(style, NoDropout) else 1 if isinstance(style, SequenceLength) else 2


def _changes(style: Style, each: Match, setting: Setting) -> list[Change]:
    if isinstance(style, REPLACING):
        _check_has_parent(each, setting)
        _check_is_simple(each)
    if isinstance(style, (Column, Row, KeyValue)):
        return _linear(style, each, setting)
    if isinstance(style, Vocab):
        _check_kind(each, nn.Embedding, style)
        return [_replacement(each, make_embedding(style, each, setting.tp), setting)]
    if isinstance(style, Dropout):
        return _dropout(style, each, setting)
    if isinstance(style, (Norm, HeadNorm)):
        return _norm(style, each, setting)
    if isinstance(style, NoDropout):
        return _no_dropout(style, each, setting)
    if isinstance(style, SetAttribute):
        return [_attribute(style, each, setting)]
    if isinstance(style, Whole):
        return []
    return _region(style, each, setting)


def _linear(style: Column | Row | KeyValue, each: Match, setting: Setting) -> list[Change]:
    residual = setting.residual
    enters = any(isinstance(other, Enter) for other in each.styles)
    is_entered = id(each.module) in setting.entered or (isinstance(style, Column) and style.entered)
    sequence = residual.sequence if enters or isinstance(style, Row) else None
    made = make_linear(style, each, setting.tp, is_entered=is_entered, sequence=sequence)
    changes: list[Change] = [_replacement(each, made, setting)]
    if enters and residual.is_cut:
        changes.append(Hook(made.layer, FollowSequence(residual), before=True))
    return changes


def _dropout(style: Dropout, each: Match, setting: Setting) -> list[Change]:
    _check_kind(each, nn.Dropout, style)
    assert isinstance(each.module, nn.Dropout)
    if setting.place is None:
        raise ShardingError(
            f"{each.name}: masks depend on the step and the samples, so the plan's Dropout needs "
            "parallelize(..., dropout_place=DropoutPlace()), which is set before each forward"
        )
    layer = PlacedDropout(each.module.p, style.seed, each.name, place=setting.place)
    changes: list[Change] = [_replacement(each, Made(layer, {}), setting)]
    if style.in_sequence and setting.residual.is_cut:
        changes.append(Hook(layer, FollowSequence(setting.residual), before=True))
    return changes


def _replacement(each: Match, made: Made, setting: Setting) -> Replacement:
    parents = setting.parents[id(each.module)]
    return Replacement(each.name, parents, each.module, made.layer, made.cuts, setting.tp)


def _region(
    style: Enter | SplitSequence | JoinSequence | SequenceLength, each: Match, setting: Setting
) -> list[Change]:
    module, residual = each.module, setting.residual
    if isinstance(style, JoinSequence):
        if not residual.is_cut and not style.partial_gradient:
            return []
        return [Hook(module, JoinRegion(residual, style.partial_gradient), before=False)]
    if isinstance(style, SequenceLength):
        heard = Argument.of(module, style.argument, each.name, others=True)
        return [Hook(module, HearLength(residual, heard, style.dim), before=True)]
    argument = Argument.of(module, style.argument, each.name)
    if isinstance(style, Enter):
        return [Hook(module, EnterRegion(residual, argument, each.name), before=True)]
    if not residual.is_cut:
        return []
    return [Hook(module, SplitRegion(residual, argument, each.name), before=True)]


def _norm(style: Norm | HeadNorm, each: Match, setting: Setting) -> list[Change]:
    if hasattr(each.module, "parameter_placements"):
        raise ShardingError(
            f"{each.name} ({type(each.module).__name__}) places its parameters itself, so the plan "
            f"cannot: leave out {style}"
        )
    if isinstance(style, Norm) and not setting.residual.is_cut:
        return []
    return [Placed(each.name, each.module)]


def _no_dropout(style: NoDropout, each: Match, setting: Setting) -> list[Change]:
    _check_attribute(each, style.attribute)
    return refuse_dropout(each.name, each.module, style.attribute, setting.tp)


def refuse_dropout(
    name: str, module: nn.Module, attribute: str | None, tp: Communicator
) -> list[Change]:
    """Return the hook that refuses dropout in training, where several ranks would not agree.

    Raises:
        ShardingError: The module is in training mode and drops values.
    """
    if tp.size == 1:
        return []
    hook = NoDropoutHere(name, attribute)
    if module.training:
        hook.check(module)
    return [Hook(module, hook, before=True)]


def _attribute(style: SetAttribute, each: Match, setting: Setting) -> Change:
    _check_attribute(each, style.name)
    if len(style.values) != setting.tp.size:
        raise ShardingError(
            f"{each.name}: {style} has {len(style.values)} values for tp={setting.tp.size}; make "
            "the plan for as many ranks"
        )
    return Attribute(each.module, style.name, style.values[setting.tp.rank])


def _check_attribute(each: Match, name: str) -> None:
    if not hasattr(each.module, name):
        raise ShardingError(
            f"{each.name} ({type(each.module).__name__}) has no attribute {name!r}, which the plan "
            "names"
        )


def _check_kind(each: Match, kind: type[nn.Module], style: Style) -> None:
    found = type(each.module)
    if not issubclass(found, kind) or found.forward is not kind.forward:
        raise ShardingError(
            f"{each.name} is a {found.__name__}, but {type(style).__name__} replaces modules that "
            f"compute what nn.{kind.__name__} does; leave it out of the plan to keep it whole"
        )


def _check_has_parent(each: Match, setting: Setting) -> None:
    if id(each.module) not in setting.parents:
        raise ShardingError(
            f"a {type(each.module).__name__} that is the module itself cannot be replaced in its "
            "place; put it into a module, such as nn.Sequential"
        )


def _check_is_simple(each: Match) -> None:
    """Raise where a module is more than its weight and bias, which the layer would not have."""
    module = each.module
    held = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    if any(held) or "forward" in vars(module):
        raise ShardingError(
            f"{each.name} has hooks or a forward of its own, which the layer in its place would "
            "not run; remove them, and add them after parallelize()"
        )
    own = {*module._parameters, *module._buffers, *module._modules}
    if not own <= {"weight", "bias"}:
        raise ShardingError(
            f"{each.name} has {', '.join(sorted(own - {'weight', 'bias'}))}, which the layer in "
            "its place would not have; remove what was added (parametrizations, adapters) before "
            "parallelize(), or leave it out of the plan to keep it whole"
        )
    if isinstance(module, NonDynamicallyQuantizableLinear):
        raise ShardingError(
            f"{each.name} is read by nn.MultiheadAttention without being run, so no layer can "
            "stand in its place; attention must be written with layers of its own"
        )
