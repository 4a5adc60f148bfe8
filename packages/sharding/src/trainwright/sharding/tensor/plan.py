"""Which modules a plan's patterns mean, and what is wrong with a plan before anything changes."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import attrs
from torch import nn

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.styles import (
    Column,
    Dropout,
    Enter,
    HeadNorm,
    JoinSequence,
    KeyValue,
    Norm,
    Plan,
    Row,
    SplitSequence,
    Style,
    Vocab,
    Whole,
)

REPLACING = (Column, Row, Vocab, KeyValue, Dropout)
"""The styles that put another module in a module's place."""
_STYLES = typing.get_args(Style)
_SPEAKING = (*REPLACING, Norm, HeadNorm, Whole)


@attrs.frozen(eq=False)
class Match:
    """A module of a model and what the plan says of it.

    Args:
        names: The module's names in the model, first name first; a shared module has several.
        module: The module.
        styles: In the order of the plan.
    """

    names: tuple[str, ...]
    module: nn.Module
    styles: tuple[Style, ...]

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    def has(self, *kinds: type) -> bool:
        """Return whether a style is of one of the given kinds."""
        return any(isinstance(style, kinds) for style in self.styles)


def match(module: nn.Module, plan: Plan) -> list[Match]:
    """Return the modules that a plan speaks of, in the order of the model.

    Args:
        module: The model.
        plan: Styles by name pattern; ``*`` stands for part of one dotted level, "" for the model.

    Raises:
        ShardingError: A pattern matches nothing, two match one module, or styles do not go
            together.
    """
    styles = {pattern: _styles_of(pattern, said) for pattern, said in plan.items()}
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        names.setdefault(id(child), []).append(name)
        modules[id(child)] = child
    every_name = [name for group in names.values() for name in group]
    found = {pattern: {n for n in every_name if _matches(n, pattern)} for pattern in styles}
    for pattern, hits in found.items():
        if not hits:
            raise ShardingError(
                f"pattern {pattern!r} matches no module{_hint(pattern, every_name)}"
            )
    matches = []
    for key, group in names.items():
        chosen = {pattern: styles[pattern] for pattern in styles if found[pattern] & set(group)}
        if not chosen:
            continue
        first, *others = chosen
        if others and (len(group) == 1 or any(chosen[other] != chosen[first] for other in others)):
            raise ShardingError(
                f"patterns {first!r} and {others[0]!r} both match {group[0]!r}; a module is "
                "matched by one pattern, whose value may be several styles"
            )
        matches.append(Match(tuple(group), modules[key], chosen[first]))
    return matches


def names_matching(module: nn.Module, pattern: str) -> list[str]:
    """Return the names of the modules that a pattern means."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    return [name for name in names if _matches(name, pattern)]


def entered_modules(matches: Iterable[Match]) -> dict[int, str]:
    """Return, by id, the modules inside one with `Enter` and that one's name."""
    found: dict[int, str] = {}
    for each in matches:
        if each.has(Enter) and not each.has(*REPLACING):
            for inner in each.module.modules():
                found.setdefault(id(inner), each.name)
    return found


def check_plan(module: nn.Module, matches: Sequence[Match], *, has_sequence: bool) -> None:
    """Raise where styles of different modules contradict each other, or one is missing.

    Raises:
        ShardingError: A gradient would be summed twice, not at all, or nobody says whether.
    """
    entered = entered_modules(matches)
    _check_entrances(matches, entered)
    if has_sequence:
        _check_ends_of_sequence(matches)
    rest = "belongs to a model whose sequences are cut over the ranks" if has_sequence else None
    if rest is None and any(_sums_behind(style) for each in matches for style in each.styles):
        rest = "may lie behind JoinSequence(partial_gradient=True)"
    _check_all_spoken_for(module, matches, entered, rest)


def _check_entrances(matches: Sequence[Match], entered: dict[int, str]) -> None:
    for each in matches:
        if each.has(Enter):
            _check_entrance(each, matches, entered)
    joins = [each for each in matches for s in each.styles if _sums_behind(s)]
    heads = [each for each in matches for s in each.styles if isinstance(s, Column) and s.entered]
    outside = [each for each in heads if id(each.module) not in entered]
    if outside and not joins:
        raise ShardingError(
            f"{outside[0].name} has Column(entered=True), but nothing sums the gradient of its "
            "input: say JoinSequence(partial_gradient=True) of the module before it, or leave out "
            "entered=True"
        )
    if joins and not outside:
        raise ShardingError(
            f"{joins[0].name} has JoinSequence(partial_gradient=True), but no layer behind it has "
            "Column(entered=True): the sum would be too large; leave out partial_gradient=True"
        )


def _check_entrance(each: Match, matches: Sequence[Match], entered: dict[int, str]) -> None:
    around = entered.get(id(each.module))
    if around not in (None, each.name):
        raise ShardingError(
            f"{each.name} has Enter() and is inside {around!r}, which has it too: its input's "
            "gradient would be summed twice; leave one of them out"
        )
    ids = {id(inner) for inner in each.module.modules()}
    inside = [other for other in matches if id(other.module) in ids]
    if not any(other.has(Column, KeyValue) for other in inside):
        raise ShardingError(
            f"{each.name} has Enter(), but no layer inside has Column() or KeyValue(): every "
            "rank would do the same and the sum would be too large; leave it out"
        )
    rows = [other.name for other in inside if other.has(Row)]
    if len(rows) > 1:
        raise ShardingError(
            f"{each.name} has Enter() and several Row() inside, {rows[0]} and {rows[1]}: what lies "
            "behind one of them gets a whole input, whose gradient nobody would sum; give Enter() "
            "to the module around each of them"
        )
    for other in inside:
        if other.has(Enter) and each.has(Column):
            continue
        if any(isinstance(style, Column) and style.gather_output for style in other.styles):
            raise ShardingError(
                f"{other.name} has gather_output=True and is inside {each.name!r}, of which each "
                "rank computes a part, so that the gradient of what is gathered would be a term of "
                "a sum; leave out Enter() or gather_output=True"
            )


def _sums_behind(style: Style) -> bool:
    return isinstance(style, JoinSequence) and style.partial_gradient


def _check_ends_of_sequence(matches: Sequence[Match]) -> None:
    for each in matches:
        if len(each.names) > 1 and each.has(SplitSequence, JoinSequence):
            raise ShardingError(
                f"{' and '.join(each.names)} are one module that runs several times, so it cannot "
                "be where sequences are cut or gathered; put an nn.Identity() before or behind it, "
                "and say it of that"
            )
    said = [style for each in matches for style in each.styles]
    for kind in (SplitSequence, JoinSequence):
        count = sum(isinstance(style, kind) for style in said)
        if count != 1:
            raise ShardingError(
                f"with sequence= the plan must say {kind.__name__}() of exactly one module, it "
                f"says it of {count}: SplitSequence() of the first layer, JoinSequence() of the "
                "last norm, or leave out sequence="
            )


def _check_all_spoken_for(
    module: nn.Module, matches: Iterable[Match], entered: dict[int, str], rest: str | None
) -> None:
    """Raise where a parameter's gradient could be a term of a sum and the plan does not say.

    Inside a module with `Enter`, or beside a layer whose outputs are cut, each rank does another
    part of the work, and where sequences are cut each rank sees other positions: a parameter that
    nobody speaks for would keep its rank's term of the gradient, in silence. ``rest`` says why that
    could be of all other parameters, None where it could not.
    """
    spoken = {id(each.module) for each in matches if each.has(*_SPEAKING)}
    # What is inside a layer that is replaced is the matter of that style.
    gone = [each.module for each in matches if each.has(*REPLACING)]
    spoken |= {id(inner) for module_gone in gone for inner in module_gone.modules()}
    entered = {**_beside_columns(module, matches), **entered}
    for name, inner in module.named_modules():
        own = [key for key, _ in inner.named_parameters(recurse=False)]
        if not own or id(inner) in spoken or hasattr(inner, "parameter_placements"):
            continue
        if id(inner) in entered:
            where = f"is inside {entered[id(inner)]!r}, of which each rank computes a part"
        elif rest is not None:
            where = rest
        else:
            continue
        raise ShardingError(
            f"{name or 'the module itself'} ({type(inner).__name__}) has {', '.join(own)} and "
            f"{where}, but the plan does not say whether its gradient must be summed: give it "
            "HeadNorm() (always), Norm() (where sequences are cut) or Whole() (never)"
        )


def _beside_columns(module: nn.Module, matches: Iterable[Match]) -> dict[int, str]:
    """Return, by id, the modules around a layer whose outputs are cut, and those inside of them."""
    found: dict[int, str] = {}
    for each in matches:
        cut: list[Style] = [s for s in each.styles if isinstance(s, KeyValue)]
        cut += [s for s in each.styles if isinstance(s, Column) and not s.gather_output]
        around = each.name.rpartition(".")[0]
        if cut and around and not any(isinstance(s, Column) and s.entered for s in cut):
            for inner in module.get_submodule(around).modules():
                found.setdefault(id(inner), around)
    return found


def _styles_of(pattern: str, said: Style | Iterable[Style]) -> tuple[Style, ...]:
    styles: tuple[object, ...]
    if isinstance(said, _STYLES):
        styles = (said,)
    else:
        styles = tuple(said) if isinstance(said, Iterable) else (said,)
    for style in styles:
        if not isinstance(style, _STYLES):
            raise ShardingError(
                f"{pattern!r}: {style!r} is no style; the styles are "
                f"{', '.join(kind.__name__ for kind in _STYLES)}"
            )
    replacing = [style for style in styles if isinstance(style, REPLACING)]
    others = [style for style in styles if not isinstance(style, REPLACING)]
    enters = isinstance(replacing[0], (Column, KeyValue)) if replacing else False
    fits = not others or (enters and len(others) == 1 and isinstance(others[0], Enter))
    if len(replacing) > 1 or (replacing and not fits):
        raise ShardingError(
            f"{pattern!r}: {type(replacing[0]).__name__} replaces the module, so no other style "
            "goes with it, but Enter() with Column and KeyValue; got "
            f"{', '.join(type(style).__name__ for style in styles)}"
        )
    if not styles:
        raise ShardingError(f"{pattern!r} has no style; say Whole() of what stays as it is")
    return typing.cast(tuple[Style, ...], styles)


def _matches(name: str, pattern: str) -> bool:
    levels = name.split(".")
    parts = pattern.split(".")
    return len(levels) == len(parts) and all(map(fnmatchcase, levels, parts))


def _hint(pattern: str, names: list[str]) -> str:
    shapes = list(dict.fromkeys(_without_numbers(name) for name in names if name))
    near = difflib.get_close_matches(pattern, shapes, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _without_numbers(name: str) -> str:
    return ".".join("*" if level.isdigit() else level for level in name.split("."))
