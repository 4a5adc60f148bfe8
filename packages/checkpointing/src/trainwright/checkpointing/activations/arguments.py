"""Takes arguments apart into tensors and the containers around them, and builds them again.

The tensors of a recomputed layer's arguments are saved through autograd, which notices if one is
changed in place before the recomputation. The containers are copied, so that a layer which
appends to a list does so once, and a caller may reuse a dictionary.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

Build = Callable[[Sequence[torch.Tensor]], Any]


def take_apart(value: Any, tensors: list[torch.Tensor]) -> Build:
    """Append the tensors in ``value`` to ``tensors``; return what builds ``value`` around others.

    Dictionaries, lists, tuples, named tuples, dataclasses and attrs classes are looked into. Any
    other object is handed on as it is. Every build makes new containers, which hold what the old
    ones held at the time of this call.
    """
    if isinstance(value, torch.Tensor):
        position = len(tensors)
        tensors.append(value)
        return lambda given: given[position]
    if type(value) is dict:
        entries = {key: take_apart(item, tensors) for key, item in value.items()}
        return lambda given: {key: build(given) for key, build in entries.items()}
    if type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return _take_sequence_apart(value, tensors)
    names = _field_names(value)
    if names is not None:
        return _take_record_apart(value, names, tensors)
    return lambda given: value


def _take_sequence_apart(value: list[Any] | tuple[Any, ...], tensors: list[torch.Tensor]) -> Build:
    items = [take_apart(item, tensors) for item in value]
    kind = type(value)
    if hasattr(kind, "_fields"):  # a named tuple takes its fields one by one
        return lambda given: kind(*(build(given) for build in items))
    return lambda given: kind(build(given) for build in items)


def _take_record_apart(value: Any, names: list[str], tensors: list[torch.Tensor]) -> Build:
    empty = copy.copy(value)
    fields = {
        name: take_apart(getattr(value, name), tensors) for name in names if hasattr(value, name)
    }

    def build_record(given: Sequence[torch.Tensor]) -> Any:
        record = copy.copy(empty)
        for name, build in fields.items():
            object.__setattr__(record, name, build(given))  # also where the class is frozen
        return record

    return build_record


def _field_names(value: Any) -> list[str] | None:
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    if attrs.has(type(value)):
        return [field.name for field in attrs.fields(type(value))]
    return None
