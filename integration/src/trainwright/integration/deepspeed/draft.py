"""A translation while it is made, and the words of which vocabularies are made."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from trainwright.integration.deepspeed.ignored import IGNORED
from trainwright.integration.errors import ConfigError
from trainwright.integration.values import option

AUTO = "auto"
BLOCKS = ("zero_optimization", "fp16", "bf16", "bfloat16", "optimizer", "scheduler")
"""Blocks that must not be null, which DeepSpeed does not take either."""


@attrs.define
class Draft:
    """What a configuration says, collected key by key.

    Args:
        flags: leaves that are set elsewhere, by options or a file of settings.
        drop_offload: whether blocks that move states off the device are left out.
        said: leaves that keys set, with the keys.
        implied: leaves that blocks set by their own defaults.
        taken: leaves set elsewhere that went into others.
        notes: what was ignored, and why.
    """

    flags: Mapping[str, Any]
    drop_offload: bool = False
    said: dict[str, tuple[Any, str]] = attrs.field(factory=dict)
    implied: dict[str, Any] = attrs.field(factory=dict)
    taken: set[str] = attrs.field(factory=set)
    notes: list[str] = attrs.field(factory=list)

    def say(self, leaf: str, value: Any, key: str) -> None:
        """Set a leaf.

        Raises:
            ConfigError: it is set otherwise, by another key, an option or a file of settings.
        """
        before, other = self.said.get(leaf, (value, key))
        if before != value:
            raise ConfigError(f"{other} says {before} and {key} says {value}; say one of them")
        self.agrees(leaf, value, key)
        self.said[leaf] = value, key

    def agrees(self, leaf: str, value: Any, key: str) -> None:
        """Check that a leaf is not set to something else elsewhere.

        Raises:
            ConfigError: it is; both values are named.
        """
        given = self.flags.get(leaf)
        if given is not None and given != value:
            raise ConfigError(
                f"{key} says {value} and {option(leaf)} says {given}; say one of them, or "
                f'"{AUTO}" in the file'
            )

    def imply(self, leaf: str, value: Any) -> None:
        """Set a leaf that nothing else sets."""
        self.implied[leaf] = value

    def take(self, leaf: str) -> Any:
        """Return what is set elsewhere, where it has no effect from now on."""
        self.taken.add(leaf)
        return self.flags.get(leaf)

    def leaves(self) -> dict[str, Any]:
        """Return all leaves, for use over those set elsewhere."""
        free = {n: v for n, v in self.implied.items() if self.flags.get(n) is None}
        told = {name: value for name, (value, _) in self.said.items()}
        return {**free, **told, **dict.fromkeys(self.taken & self.flags.keys())}


Word = Callable[[Draft, str, Any], None]
"""Puts the value of a key, which is named with its blocks, into a draft, or raises."""


def translate(draft: Draft, words: Mapping[str, Word], block: object, path: str = "") -> None:
    """Put all of a block into a draft, in the order of ``words``.

    Raises:
        ConfigError: a key is unknown, refused, or has a value that is not allowed.
    """
    if not isinstance(block, Mapping):
        raise ConfigError(f"{path or 'the configuration'} must be a block, got {block!r}")
    inside = f"{path}." if path else ""
    # A key with dots in its name is not the key of the block that it looks like.
    paths = {tuple(name.rpartition(".")[::2]): why for name, why in IGNORED.items()}
    ignored = {name: why for (outer, name), why in paths.items() if outer == path}
    for key, value in block.items():
        if key in ignored:
            draft.notes.append(f"{inside}{key} is ignored: {ignored[key]}")
        elif key not in words:
            near = difflib.get_close_matches(str(key), [*words, *ignored], n=1)
            hint = f"; did you mean {inside}{near[0]}?" if near else ""
            raise ConfigError(f"unknown key {inside}{key}{hint}")
        elif value is None and key in BLOCKS:
            raise ConfigError(f"{inside}{key} must be a block, got null; leave it out")
    for key, word in words.items():
        if block.get(key) is not None and key not in ignored:
            word(draft, f"{inside}{key}", block[key])


def sets(leaf: str, convert: Callable[[str, Any], Any]) -> Word:
    """Return a word whose value is a leaf; "auto" leaves it to options and defaults."""

    def word(draft: Draft, key: str, value: Any) -> None:
        if value != AUTO:
            draft.say(leaf, convert(key, value), key)

    return word


def only(value: Any, why: str) -> Word:
    """Return a word of which one value describes what is done here."""

    def word(draft: Draft, key: str, given: Any) -> None:
        if type(given) is not type(value) or given != value:
            raise ConfigError(f"{key} must be {shown(value)}, got {shown(given)}: {why}")

    return word


def refused(why: str) -> Word:
    """Return a word that is never accepted."""

    def word(draft: Draft, key: str, value: Any) -> None:
        raise ConfigError(f"{key} is not available: {why}")

    return word


def off(why: str, switch: str = "enabled") -> Word:
    """Return a block that may be there as long as it is switched off, in so many words.

    Other keys without the switch are refused: it may be there under a mistyped name.
    """

    def word(draft: Draft, key: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} must be a block, got {shown(value)}")
        if value and value.get(switch) is not False:
            raise ConfigError(
                f"{key} is not available: {why}; leave it out, or say {key}.{switch}=false"
            )
        if len(value) > 1:
            draft.notes.append(f"{key} is not enabled: its other keys have no effect")

    return word


def whole(least: int) -> Callable[[str, Any], int]:
    """Return what reads a whole number, which may be written ``5e8``."""

    def convert(key: str, value: Any) -> int:
        number = number_of(key, value)
        if not number.is_integer() or number < least:
            raise ConfigError(f"{key} must be a whole number from {least}, got {value!r}")
        return int(value)

    return convert


def number_of(key: str, value: Any) -> float:
    """Read a finite number."""
    right = isinstance(value, int | float) and not isinstance(value, bool)
    if not right or not abs(value) <= sys.float_info.max:
        raise ConfigError(f"{key} must be a finite number, got {shown(value)}")
    return float(value)


def truth(key: str, value: Any) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Return a value as JSON writes it, as far as messages need it."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
