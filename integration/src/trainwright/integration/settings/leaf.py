"""A single setting: its default, its help, its kind and its checks, stated once where it lives."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.integration.values import option

Check = Callable[[Any, "attrs.Attribute[Any]", Any], None]
HELP = "help"
NONE = "none"
"""The text that stands for None."""

_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


@attrs.frozen
class Kind:
    """What values a setting may have.

    Args:
        base: text, whole numbers, numbers or truth values.
        optional: whether it may be None.
        many: whether it is a tuple of such values.
    """

    base: type
    optional: bool = False
    many: bool = False

    @property
    def words(self) -> str:
        """The kind as errors name it."""
        words = f"a list, each {_WORDS[self.base]}" if self.many else _WORDS[self.base]
        return f"{words} or none" if self.optional else words

    def admits(self, value: object) -> bool:
        """Whether a value is of this kind."""
        if value is None:
            return self.optional
        if self.many:
            return isinstance(value, tuple) and all(self._is_one(item) for item in value)
        return self._is_one(value)

    def parse(self, text: str) -> Any:
        """Read a value from the command line: commas between many, ``none`` for None.

        Raises:
            ValueError: the text is no such value.
        """
        if self.optional and text == NONE:
            return None
        if self.many:
            return tuple(self.base(item) for item in text.split(",") if item)
        return self.base(text)

    def write(self, value: object) -> str:
        """Return the text from which `parse` reads the value."""
        if value is None:
            return NONE
        if isinstance(value, tuple):
            return ",".join(str(item) for item in value)
        return str(value)

    def _is_one(self, value: object) -> bool:
        if isinstance(value, bool):
            return self.base is bool
        return isinstance(value, (int, float) if self.base is float else self.base)


def leaf(
    default: Any, text: str, *checks: Check, converter: Callable[[Any], Any] | None = None
) -> Any:
    """Return the attrs field of a setting.

    Its annotation says its kind: str, int, float or bool, a tuple of them, or one of these or None.

    Args:
        default: what it is where nobody says otherwise.
        text: what ``--help`` says of it.
        checks: of values that are not None.
        converter: what makes the value of the one given, before it is checked; None: nothing.
    """
    validators = [_check_kind, *(attrs.validators.optional(check) for check in checks)]
    return attrs.field(
        default=default, validator=validators, converter=converter, metadata={HELP: text}
    )


@functools.cache
def kinds_of(section: type[attrs.AttrsInstance]) -> Mapping[str, Kind]:
    """Return the kinds of a section's settings by their names."""
    hints = typing.get_type_hints(section)
    return {
        field.name: _kind(hints[field.name])
        for field in attrs.fields(section)
        if HELP in field.metadata
    }


def _check_kind(section: attrs.AttrsInstance, field: attrs.Attribute[Any], value: object) -> None:
    kind = kinds_of(type(section))[field.name]
    if not kind.admits(value):
        raise ConfigError(f"{option(field.name)} must be {kind.words}, got {value!r:.200}")


def _kind(hint: Any) -> Kind:
    optional = False
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        optional = True
    if typing.get_origin(hint) is tuple:
        return Kind(typing.get_args(hint)[0], optional, many=True)
    return Kind(hint, optional)
