"""Settings as a tree of sections, whose leaves have unique names: found, filled, written."""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.integration.settings.leaf import HELP, NONE, Kind, kinds_of

Tree = TypeVar("Tree", bound=attrs.AttrsInstance)


@attrs.frozen
class Leaf:
    """Where a setting is, and what it may be.

    Args:
        section: name of its section; empty at the top of the tree.
        name: its own name.
        kind: what values it may have.
        help: what ``--help`` says of it.
    """

    section: str
    name: str
    kind: Kind
    help: str

    @property
    def path(self) -> str:
        """The setting's name with that of its section."""
        return f"{self.section}.{self.name}" if self.section else self.name


@functools.cache
def leaves_of(tree: type[attrs.AttrsInstance]) -> Mapping[str, Leaf]:
    """Return all leaves by name, those at the top first."""
    hints = typing.get_type_hints(tree)
    places: list[tuple[str, type[attrs.AttrsInstance]]] = [("", tree)]
    # What is no leaf of the tree is a section of it.
    places += [(f.name, hints[f.name]) for f in attrs.fields(tree) if HELP not in f.metadata]
    found = [
        Leaf(name, field.name, kinds_of(cls)[field.name], field.metadata[HELP])
        for name, cls in places
        for field in attrs.fields(cls)
        if HELP in field.metadata
    ]
    leaves = {leaf.name: leaf for leaf in found}
    assert len(leaves) == len(found), "two sections have a leaf of one name"
    return leaves


def values_of(tree: attrs.AttrsInstance) -> dict[str, Any]:
    """Return the values of all leaves by name."""
    return {
        leaf.name: getattr(getattr(tree, leaf.section) if leaf.section else tree, leaf.name)
        for leaf in leaves_of(type(tree)).values()
    }


def evolve(tree: Tree, values: Mapping[str, Any]) -> Tree:
    """Return the tree with other values of some leaves.

    Of a leaf that may be None the text ``none`` says so, in files as on the command line.

    Raises:
        ConfigError: there is no such leaf (the nearest is named), or its value is not allowed.
    """
    leaves = leaves_of(type(tree))
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in leaves:
            raise ConfigError(f"unknown setting {name!r}{_hint(name, leaves)}")
        leaf = leaves[name]
        if leaf.kind.optional and value == NONE:
            value = None
        is_list = leaf.kind.many and isinstance(value, list)
        changes.setdefault(leaf.section, {})[name] = tuple(value) if is_list else value
    top = changes.pop("", {})
    for name, inside in changes.items():
        top[name] = attrs.evolve(getattr(tree, name), **inside)
    before: Any = tree
    evolved: Tree = attrs.evolve(before, **top)
    return evolved


def flatten(tree: type[attrs.AttrsInstance], mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of plain nested values by name.

    A leaf stands in its section; as names are unique it may stand at the top as well.

    Raises:
        ConfigError: a key is unknown (the nearest one is named), stands in another section than
            its own, or is given twice.
    """
    leaves = leaves_of(tree)
    sections = {leaf.section for leaf in leaves.values()} - {""}
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if key in sections and isinstance(value, Mapping):
            found = {name: inner for name, inner in value.items() if _is_in(key, name, leaves)}
        elif key in leaves:
            found = {key: value}
        elif key in sections:
            raise ConfigError(f"{key} is a section of settings, got {value!r:.200}")
        else:
            near = _hint(key, {}, sections) if isinstance(value, Mapping) else _hint(key, leaves)
            raise ConfigError(f"unknown setting {key!r}{near}")
        for name in found.keys() & flat.keys():
            raise ConfigError(f"{name} is given twice, at the top and as {leaves[name].path}")
        flat.update(found)
    return flat


def nest(tree: attrs.AttrsInstance) -> dict[str, Any]:
    """Return the tree as plain nested values, which `flatten` reads."""
    return attrs.asdict(tree)


def _is_in(section: str, name: str, leaves: Mapping[str, Leaf]) -> bool:
    """Whether the section has the leaf; raises where it has not."""
    if name in leaves and leaves[name].section == section:
        return True
    if name in leaves:
        raise ConfigError(f"unknown setting {section}.{name}; did you mean {leaves[name].path}?")
    raise ConfigError(f"unknown setting {section}.{name}{_hint(name, leaves)}")


def _hint(name: str, leaves: Mapping[str, Leaf], sections: Iterable[str] = ()) -> str:
    near = difflib.get_close_matches(name, [*leaves, *sections], n=1)
    if not near:
        return ""
    return f"; did you mean {leaves[near[0]].path if near[0] in leaves else near[0]}?"
