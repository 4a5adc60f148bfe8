"""What sees what, as rectangles and triangles of queries and keys."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import attrs

from trainwright.sharding.context.documents import Documents, Run
from trainwright.sharding.context.time_order import Range, size
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.cuts import Ranges


@attrs.frozen
class Span:
    """A block of queries and keys: each query sees all keys, or as many as its place in it.

    Args:
        queries: Range (start, stop) of query indices; not empty.
        keys: Range of key indices; not empty.
        causal: Whether the n-th query sees the first n keys only; the ranges are then of one size.
        rows: Range of sequences of the batch; None: all.

    Raises:
        ShardingError: A range is empty or negative, or a causal span is not square.
    """

    queries: Range
    keys: Range
    causal: bool = False
    rows: Range | None = None

    def __attrs_post_init__(self) -> None:
        for start, stop in (self.queries, self.keys, self.rows or (0, 1)):
            if not 0 <= start < stop:
                raise ShardingError(f"ranges of a span hold at least one index, got {self}")
        if self.causal and size(self.queries) != size(self.keys):
            raise ShardingError(f"a causal span has as many queries as keys, got {self}")

    @property
    def area(self) -> int:
        """How many pairs of a query and a key it has, for each sequence and head."""
        num = size(self.queries)
        return num * (num + 1) // 2 if self.causal else num * size(self.keys)


@attrs.frozen
class Segment:
    """Neighbours in a rank's order and in time, of one document.

    Args:
        start: Index of the first on the rank.
        stop: Index after the last.
        position: Position of the first in the whole sequence.
        document: Its number.
    """

    start: int
    stop: int
    position: int
    document: int

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.position + self.stop - self.start


Segments = tuple[tuple[Range | None, dict[int, list[Segment]]], ...]
"""By range of sequences whose documents are alike (None: all), the segments of each document."""


def spans_between(
    queries: Ranges, keys: Ranges, *, causal: bool, documents: Documents | None = None
) -> tuple[Span, ...]:
    """Return what queries at some positions see of keys at some positions.

    Args:
        queries: Ranges of positions, in the order in which the queries lie.
        keys: Ranges of positions, in the order in which the keys lie.
        causal: Whether a position sees none after itself.
        documents: Which positions see each other at all; None: all.

    Returns:
        Spans that hold each pair once; sequences whose documents are alike share theirs. None for
        a block in which nothing is visible.
    """
    asking, asked = segments_of(queries, documents), segments_of(keys, documents)
    return spans_of_segments(asking, asked, causal)


def segments_of(ranges: Ranges, documents: Documents | None) -> Segments:
    """Cut the ranges of positions that a rank holds at the documents."""
    if documents is None:
        end = max((stop for _, stop in ranges), default=0)
        return ((None, _by_document(ranges, [Run(0, end, 0)])),)
    found: list[tuple[Range | None, dict[int, list[Segment]]]] = []
    row = 0
    for runs, same in itertools.groupby(documents.rows):
        alike = len(list(same))
        found.append(((row, row + alike), _by_document(ranges, runs)))
        row += alike
    return tuple(found)


def spans_of_segments(queries: Segments, keys: Segments, causal: bool) -> tuple[Span, ...]:
    """Return what queries see of keys, both cut at the same documents."""
    found: list[Span] = []
    for (rows, asking), (_, asked) in zip(queries, keys, strict=True):
        for document in asking.keys() & asked.keys():
            found += _of_document(asking[document], asked[document], causal, rows)
    # In the order of the keys, whatever the order of the set.
    found.sort(key=lambda span: (span.rows or (0, 0), span.keys, span.queries))
    return tuple(found)


def hull_of_keys(spans: Iterable[Span]) -> Range | None:
    """Return the range from the first to the last key that is seen; None where none is."""
    ranges = [span.keys for span in spans]
    if not ranges:
        return None
    return min(start for start, _ in ranges), max(stop for _, stop in ranges)


def within_keys(span: Span, first: int, last: int) -> Iterator[Span]:
    """Yield what a span has in a range of keys, which are then counted from the first of them."""
    start, stop = max(span.keys[0], first), min(span.keys[1], last)
    if start >= stop:
        return
    keys = (start - first, stop - first)
    if not span.causal:
        yield Span(span.queries, keys, rows=span.rows)
        return
    query = span.queries[0] + start - span.keys[0]
    later = query + stop - start
    yield Span((query, later), keys, True, span.rows)
    if later < span.queries[1]:
        yield Span((later, span.queries[1]), keys, rows=span.rows)


def by_queries(span: Span, most: int) -> Iterator[Span]:
    """Yield a rectangle in parts of at most so many queries; a triangle is one part."""
    if span.causal:
        yield span
        return
    for start in range(*span.queries, most):
        yield attrs.evolve(span, queries=(start, min(start + most, span.queries[1])))


def _of_document(
    asking: list[Segment], asked: list[Segment], causal: bool, rows: Range | None
) -> Iterator[Span]:
    if causal and _is_one_stretch(asking, asked):
        stretch = (asking[0].start, asking[-1].stop)
        yield Span(stretch, (asked[0].start, asked[-1].stop), True, rows)
        return
    pairs = [_pair(one, other, causal) for one in asking for other in asked]
    for span in _joined([found for pair in pairs for found in pair]):
        yield attrs.evolve(span, rows=rows)


def _by_document(ranges: Ranges, runs: Sequence[Run]) -> dict[int, list[Segment]]:
    found: defaultdict[int, list[Segment]] = defaultdict(list)
    stops = [run.stop for run in runs]
    at = 0
    for start, stop in ranges:
        for run in itertools.islice(runs, bisect.bisect_right(stops, start), None):
            first, last = max(start, run.start), min(stop, run.stop)
            if first >= last:
                break
            index = at + first - start
            segment = Segment(index, index + last - first, first, run.document)
            found[run.document].append(segment)
        at += stop - start
    return dict(found)


def _is_one_stretch(queries: Sequence[Segment], keys: Sequence[Segment]) -> bool:
    """Whether both are the same positions in time order, without a gap on their ranks."""
    if [(q.position, q.end) for q in queries] != [(k.position, k.end) for k in keys]:
        return False
    return all(
        earlier.stop == later.start and earlier.end <= later.position
        for segments in (queries, keys)
        for earlier, later in itertools.pairwise(segments)
    )


def _pair(asking: Segment, asked: Segment, causal: bool) -> list[Span]:
    """Return what two segments of one document have in common."""
    whole = Span((asking.start, asking.stop), (asked.start, asked.stop))
    if not causal or asked.end <= asking.position + 1:
        return [whole]
    found = []
    # Keys before all queries, then the triangle where both run together, then later queries.
    together = max(asking.position, asked.position)
    end = min(asking.end, asked.end)
    first_query = asking.start + together - asking.position
    first_key = asked.start + together - asked.position
    if asked.start < first_key:
        found.append(Span(whole.queries, (asked.start, first_key)))
    if together < end:
        later = first_query + end - together
        keys = (first_key, first_key + end - together)
        found.append(Span((first_query, later), keys, True))
        if later < asking.stop:
            found.append(Span((later, asking.stop), keys))
    return found


def _joined(spans: list[Span]) -> list[Span]:
    """Join rectangles that meet along keys, then along queries: fewer and larger products."""
    triangles = [span for span in spans if span.causal]
    blocks = _join_neighbours([(span.queries, span.keys) for span in spans if not span.causal])
    turned = _join_neighbours([(keys, queries) for queries, keys in blocks])
    return triangles + [Span(queries, keys) for keys, queries in turned]


def _join_neighbours(blocks: list[tuple[Range, Range]]) -> list[tuple[Range, Range]]:
    """Join blocks of equal first range whose second ranges meet."""
    found: list[tuple[Range, Range]] = []
    for across, along in sorted(blocks):
        if found and found[-1][0] == across and found[-1][1][1] == along[0]:
            found[-1] = (across, (found[-1][1][0], along[1]))
        else:
            found.append((across, along))
    return found
