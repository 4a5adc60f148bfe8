"""What sessions took: seconds, seconds of processors, memory, side by side."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Mapping


@dataclasses.dataclass
class Figures:
    """What a session took, with all that was done in it.

    Args:
        seconds: by the clock.
        processor_seconds: of all its processes.
        mebibytes: of the largest process of its suite; 0 where it ran none.
    """

    seconds: float = 0.0
    processor_seconds: float = 0.0
    mebibytes: float = 0.0


def table(figures: Mapping[str, Figures]) -> str:
    """Return a line for each session, and one for all of them."""
    together = Figures(
        sum(each.seconds for each in figures.values()),
        sum(each.processor_seconds for each in figures.values()),
        max((each.mebibytes for each in figures.values()), default=0.0),
    )
    lines = [f"{'session':36} {'seconds':>9} {'processors':>11} {'MiB':>6}"]
    for name, each in [*figures.items(), ("together", together)]:
        memory = f"{each.mebibytes:6.0f}" if each.mebibytes else f"{'-':>6}"
        lines.append(f"{name:36} {each.seconds:9.1f} {each.processor_seconds:11.1f} {memory}")
    return "\n".join(lines)


def processor_seconds() -> float:
    """Return the seconds of processors of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
