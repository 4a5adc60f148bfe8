"""What the processes of a timed run do: check that all get the same, then take turns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

import attrs
import torch
import torch.distributed as dist

from tools.bench.collectives.contestants import Case, Contestants
from tools.bench.rounds import interleave
from trainwright.collectives import Communicator

_ROUND_S = 0.03
_MAX_STEPS = 400


@attrs.frozen
class Sweep:
    """What to time.

    Args:
        names: The contestants; the first is the reference.
        operations: The collectives.
        dtypes: Names of dtypes of torch.
        sizes: Bytes of the large tensor.
        rounds: How often each contestant has its turn in each case.
    """

    names: tuple[str, ...]
    operations: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int

    def cases(self) -> Iterator[tuple[str, str, int]]:
        """Yield operation, dtype and bytes of each case."""
        yield from itertools.product(self.operations, self.dtypes, self.sizes)


Outcomes = list[dict[str, list[float]]]
"""For each case of a sweep the seconds of an operation, by contestant and round."""


def race(world: Communicator, sweeps: Sequence[Sweep]) -> list[Outcomes]:
    """Run all sweeps over the same connections.

    Raises:
        ArithmeticError: contestants do not get the same.
    """
    contestants = Contestants()
    return [_run(world, contestants, sweep) for sweep in sweeps]


def _run(world: Communicator, contestants: Contestants, sweep: Sweep) -> Outcomes:
    outcomes = []
    for operation, dtype, num_bytes in sweep.cases():
        cases = {
            name: contestants.build(name, operation, num_bytes, getattr(torch, dtype))
            for name in sweep.names
        }
        _check(world, cases, f"{operation}, {dtype}, {num_bytes} bytes")
        steps = _choose_steps(cases[sweep.names[0]])
        seconds: dict[str, list[float]] = {name: [] for name in sweep.names}
        for order in interleave(sweep.names, sweep.rounds):
            for name in order:
                seconds[name].append(_time(cases[name], steps))
        outcomes.append(seconds)
    return outcomes


def _check(world: Communicator, cases: dict[str, Case], what: str) -> None:
    found = {}
    for name, case in cases.items():
        case.fill(world.rank)
        case.run()
        found[name] = case.results()
        # Sums that grow from step to step would end in infinities.
        case.fill(world.rank)
    names = list(found)
    for name in names[1:]:
        for mine, other in zip(found[name], found[names[0]], strict=True):
            if not torch.equal(mine, other):
                raise ArithmeticError(f"{what}: {name} and {names[0]} differ on rank {world.rank}")


def _choose_steps(reference: Case) -> int:
    """Return how many operations fill a round; the same number on all ranks."""
    seconds = torch.tensor([_time(reference, 2)])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return max(1, min(_MAX_STEPS, int(_ROUND_S / seconds.item())))


def _time(case: Case, steps: int) -> float:
    # Others have been here since: the caches hold their data.
    case.run()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        case.run()
    return (time.perf_counter() - start) / steps
