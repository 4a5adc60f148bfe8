"""The leaves of the settings as options of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from trainwright.integration.config import RunConfig
from trainwright.integration.settings.tree import Leaf, leaves_of
from trainwright.integration.values import option


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each leaf, in groups named for the sections.

    Options that are not given leave no trace in what is parsed.
    """
    defaults = RunConfig().leaves()
    groups: dict[str, Callable[..., Any]] = {"": parser.add_argument}
    for leaf in leaves_of(RunConfig).values():
        if leaf.section not in groups:
            groups[leaf.section] = parser.add_argument_group(leaf.section).add_argument
        _add(groups[leaf.section], leaf, defaults[leaf.name])


def given_leaves(options: argparse.Namespace) -> dict[str, Any]:
    """Return the leaves that were given on the command line, by name."""
    return {name: value for name, value in vars(options).items() if name in leaves_of(RunConfig)}


def written(config: RunConfig) -> list[str]:
    """Return the options that say all that the settings say."""
    words: list[str] = []
    for leaf in leaves_of(RunConfig).values():
        name, value = option(leaf.name), config.leaves()[leaf.name]
        if leaf.kind.base is bool and value is None:
            continue  # what is not said
        elif leaf.kind.base is bool:
            words.append(name if value else name.replace("--", "--no-", 1))
        elif value is not None or leaf.kind.optional:
            words.append(f"{name}={leaf.kind.write(value)}")
    return words


def _add(add: Callable[..., Any], leaf: Leaf, default: object) -> None:
    text = leaf.help.replace("%", "%%")
    common = {"dest": leaf.name, "default": argparse.SUPPRESS}
    if leaf.kind.base is bool:
        add(option(leaf.name), action=argparse.BooleanOptionalAction, help=text, **common)
        return
    shown = "" if default is None else f" (default {leaf.kind.write(default)})"

    def parse(given: str) -> Any:
        return leaf.kind.parse(given)

    parse.__name__ = leaf.kind.base.__name__  # argparse names it in its errors
    metavar = leaf.name.rpartition("_")[2].upper()
    add(option(leaf.name), type=parse, metavar=metavar, help=text + shown, **common)
