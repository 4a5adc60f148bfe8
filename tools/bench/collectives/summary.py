"""One table of all numbers of ranks, with the targets, as a README shows it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tools.bench.collectives.report import SMALL_BYTES, Report

# The smallest geometric mean and the smallest single speed-up, for two ranks and for more.
TARGETS = {"shm": ((5.0, 3.5), (4.0, 3.0)), "resident": ((10.0, 7.0), (7.0, 5.0))}
SMALL_TARGET = 10.0

_TITLES = {"shm": "ordinary", "resident": "resident"}
_Column = tuple[Report, str]


def summarize(reports: Sequence[Report]) -> str:
    """Return how much faster shared memory is than Gloo, in Markdown.

    Args:
        reports: one for each number of ranks.
    """
    columns = [(report, name) for report in reports for name in TARGETS if name in report.names]
    if not columns:
        return ""
    head = [f"{report.ranks} ranks, {_TITLES[name]}" for report, name in columns]
    lines = [_line("speed-up over Gloo: mean (smallest)", head), "|---" * (len(head) + 1) + "|"]
    kinds = dict.fromkeys(kind for report in reports for kind in report.kinds())
    for operation, dtype in kinds:
        medians = [report.speedups(name, operation, dtype) for report, name in columns]
        lines.append(_line(f"{operation}, {dtype}", [_mean_and_least(some) for some in medians]))
    lines.append(_line("all; target", [_judge(column) for column in columns]))
    small = [_judge_small(column) for column in columns]
    if any(small):
        lines.append(_line(f"all_reduce, {SMALL_BYTES} bytes; target", small))
    return "\n".join(lines)


def _judge(column: _Column) -> str:
    report, name = column
    medians = report.speedups(name)
    if not medians:
        return ""
    mean, least = TARGETS[name][report.ranks > 2]
    is_met = _mean(medians) >= mean and min(medians) >= least
    return f"{_mean_and_least(medians)}; {mean:.0f} ({least:g}) {_verdict(is_met)}"


def _judge_small(column: _Column) -> str:
    report, name = column
    small = [row.speedups[name].median for row in report.rows if row.num_bytes == SMALL_BYTES]
    if not small:
        return ""
    return f"{min(small):.1f}; {SMALL_TARGET:.0f} {_verdict(min(small) >= SMALL_TARGET)}"


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def _mean_and_least(speedups: Sequence[float]) -> str:
    return f"{_mean(speedups):.1f} ({min(speedups):.1f})" if speedups else ""


def _mean(speedups: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(speedup) for speedup in speedups))


def _line(title: str, cells: Sequence[str]) -> str:
    return "| " + " | ".join([title, *cells]) + " |"
