"""Files of settings: TOML, YAML or JSON, in which no key stands twice."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainwright.integration.errors import ConfigError
from trainwright.integration.outside_files import parse_json, read_text

MOST_BYTES = 1 << 16
"""What is longer is no file of settings."""
DEEPEST = 20


def read_file(path: Path) -> dict[str, Any]:
    """Return the plain values in a file of settings, whose ending names its format.

    Raises:
        ConfigError: it cannot be read, or names a key twice.
    """
    parse = _PARSERS.get(path.suffix)
    if parse is None:
        raise ConfigError(f"{path} must end in one of {', '.join(_PARSERS)}, which says its format")
    try:
        values = parse(read_text(path, MOST_BYTES))
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deep to be settings: {error}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read settings from {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold settings by name, got {type(values).__name__}")
    return values


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict.

    Raises:
        ValueError: a key stands there twice.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = sorted(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{', '.join(repeated)} is there more than once")
    return made


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads what is data only, keys that are text once each, and 1e-3 as the number that it is."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return a value; settings are no deeper than sections with lists."""
        if self.depth > DEEPEST:
            # The parser's time grows with the square of the depth.
            line = self.peek_event().start_mark.line + 1
            raise ValueError(f"line {line} is nested too deep to be settings")
        if self.check_event(yaml.AliasEvent):
            # A few lines of aliases to aliases hold more values than any memory.
            event = self.peek_event()
            raise ValueError(
                f"line {event.start_mark.line + 1} has the alias *{event.anchor}; aliases are not "
                "read: write out what it stands for"
            )
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        """Return a text of whole letters: JSON writes those of high planes as two escapes."""
        found = super().construct_scalar(node)
        if not isinstance(found, str):
            return found
        return found.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} in line {line} is no text; set it in quotes")
            if key in seen:
                raise ValueError(f"{key} is there more than once, again in line {line}")
            seen.add(key)
        made: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return made


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _yaml(text: str) -> Any:
    loaded = yaml.load(text, Loader=_Loader)
    return {} if loaded is None else loaded


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": lambda text: parse_json(text, without_repeats),
}
