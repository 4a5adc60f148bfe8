"""Hypothesis strategies: JSON of which one value was replaced by one that nobody expects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["F32", "U8", "../../etc/passwd", "__crc32__", 2**40, -1, [2**40] * 3]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)

_Path = tuple[Any, ...]


@st.composite
def forgeries(draw: st.DrawFn, sound: Any) -> Any:
    """Draw ``sound`` with one value in it, at any depth, replaced, left out or doubled."""
    path = draw(st.sampled_from([*_places(sound)]))
    old = sound
    for key in path:
        old = old[key]
    if isinstance(old, list) and draw(st.booleans()):
        number = draw(st.integers(0, len(old)))
        return _replaced(sound, path, draw(st.sampled_from([old[:number], old + old[:number]])))
    return _replaced(sound, path, draw(VALUES))


def _places(value: Any, path: _Path = ()) -> Iterator[_Path]:
    """Yield the path of every value within a JSON value."""
    yield path
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _places(item, (*path, key))


def _replaced(value: Any, path: _Path, new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copy
