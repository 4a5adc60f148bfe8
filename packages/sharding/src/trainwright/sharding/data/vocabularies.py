"""Translates what other systems call their settings into a `ShardPolicy`, key by key.

Every key is mapped, or has no counterpart, which a note says with the reason, or raises. Nothing
that is given is ignored in silence.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs

from trainwright.sharding.data.policy import ShardPolicy
from trainwright.sharding.data.vocabulary_offload import AskedOffload
from trainwright.sharding.errors import NotAvailableError, ShardingError


@attrs.frozen
class Translation:
    """What settings of another system mean here.

    Args:
        policy: For `data_parallel`.
        mesh_changes: Sizes to give the `MeshShape`, such as ``{"dp_shard": 8}``: use
            ``attrs.evolve(shape, **mesh_changes)``.
        notes: What was given and has no counterpart, why, and where meanings differ.
        offload: What does not stay on the device: ``offload.make()`` is for `data_parallel`.
    """

    policy: ShardPolicy
    mesh_changes: Mapping[str, int]
    notes: tuple[str, ...]
    offload: AskedOffload = attrs.field(factory=AskedOffload)


@attrs.define
class Draft:
    """A translation while it is made: fields of the policy, sizes of the mesh, notes."""

    fields: dict[str, Any] = attrs.field(factory=dict)
    mesh_changes: dict[str, int] = attrs.field(factory=dict)
    notes: list[str] = attrs.field(factory=list)
    offload: AskedOffload = attrs.field(factory=AskedOffload)

    def finish(self) -> Translation:
        """Return the translation, which checks the policy."""
        policy = ShardPolicy(**self.fields)
        return Translation(policy, dict(self.mesh_changes), tuple(self.notes), self.offload)


Word: TypeAlias = Callable[[Draft, str, Any], None]
"""Puts the value of a key into a draft, or raises."""


def translate(
    draft: Draft, words: Mapping[str, Word], given: Mapping[str, Any], vocabulary: str
) -> None:
    """Put all settings given into a draft, in the order of ``words``.

    Raises:
        ShardingError: A key is unknown, or a value is no value of its key.
        NotAvailableError: A setting asks for what this package does not have.
    """
    for key in given:
        if key not in words:
            near = difflib.get_close_matches(key, words, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ShardingError(f"{vocabulary} has no setting {key!r}{hint}")
    for key, word in words.items():
        if key in given:
            word(draft, key, given[key])


def sets(field: str, convert: Callable[[str, Any], Any] = lambda key, value: value) -> Word:
    """Return a word whose value is a field of the policy."""

    def word(draft: Draft, key: str, value: Any) -> None:
        draft.fields[field] = convert(key, value)

    return word


def notes(why: str, *, unless: tuple[Any, ...] = ()) -> Word:
    """Return a word without counterpart: a note says why; values of ``unless`` ask for nothing."""

    def word(draft: Draft, key: str, value: Any) -> None:
        if not is_one_of(value, unless):
            draft.notes.append(f"{key}={shown(value)}: {why}")

    return word


def refuses(why: str, *, unless: tuple[Any, ...] = (None, False)) -> Word:
    """Return a word for something this package does not have; ``unless`` lists what is off."""

    def word(draft: Draft, key: str, value: Any) -> None:
        if not is_one_of(value, unless):
            raise NotAvailableError(f"{key}={shown(value)} is not available: {why}")

    return word


def to_bool(key: str, value: Any) -> bool:
    """Return a value that must be true or false."""
    if not isinstance(value, bool):
        raise ShardingError(f"{key} must be true or false, got {value!r}")
    return value


def is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return whether a value is one of these, telling False and 0 apart."""
    return any(value is one or (type(value) is type(one) and value == one) for one in allowed)


def shown(value: Any) -> str:
    """Return a value as a message shows it: short, enumerations by their name."""
    name = getattr(value, "name", None)
    text = name if isinstance(name, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
