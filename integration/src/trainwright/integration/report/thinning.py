"""Fewer points that look the same: no peak and no dip of a curve is lost, and its course shows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from trainwright.integration.report.reading import Series


def thin(series: Series, buckets: int = 240) -> Series:
    """Return at most four points a bucket of steps: the first, the least, the greatest, the last.

    Args:
        series: finite values; at most ``4 * buckets`` of them are returned as they are.
        buckets: equal ranges of steps.
    """
    if len(series) <= 4 * buckets:
        return series
    kept: set[int] = set()
    for start, stop in _parts(series, buckets):
        values = series.values[start:stop]
        kept |= {start, start + int(values.argmin()), start + int(values.argmax()), stop - 1}
    chosen = np.array(sorted(kept))
    return Series(series.steps[chosen], series.values[chosen])


def course(series: Series, buckets: int = 120) -> Series:
    """Return the mean of each of so many equal ranges of steps, at the middle of its steps."""
    parts = _parts(series, buckets)
    steps = [float(series.steps[start:stop].mean()) for start, stop in parts]
    means = [float(series.values[start:stop].mean()) for start, stop in parts]
    return Series(np.array(steps), np.array(means))


def _parts(series: Series, buckets: int) -> list[tuple[int, int]]:
    """Return where the points of each range that has some begin and end."""
    first, last = series.steps[0], series.steps[-1]
    places = np.minimum((series.steps - first) / (last - first) * buckets, buckets - 1).astype(int)
    bounds = np.flatnonzero(np.diff(places, prepend=-1, append=buckets)).tolist()
    return list(pairwise(bounds))
