"""Planting faults in copies of the tree, one at a time in each, and watching what goes red."""

from __future__ import annotations

import concurrent.futures
import queue
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from tools.mutants.faults import Fault
from tools.mutants.running import Outcome, Runner, Verdict, suites_of
from tools.mutants.tree import StaleFaultError, copy_sources, planted

DEADLINE_S = 200.0
SUITES_DEADLINE_S = 1800.0
SOUND_DEADLINE_S = 900.0
TESTS_AT_ONCE = 10


def copies(folder: Path, number: int) -> list[Path]:
    """Return trees in folders of their own, of which only the first is made from the sources."""
    for name in range(number):
        (folder / str(name)).mkdir()
    first = copy_sources(folder / "0")
    return [first] + [
        shutil.copytree(first, folder / str(name) / "tree") for name in range(1, number)
    ]


def outcomes(
    faults: Sequence[Fault], runners: Sequence[Runner], all_tests: bool
) -> Iterator[tuple[Fault, Outcome]]:
    """Plant faults, as many at once as there are runners; give what became of each as it ends."""
    free: queue.Queue[Runner] = queue.Queue()
    for runner in runners:
        free.put(runner)

    def work(fault: Fault) -> Outcome:
        runner = free.get()
        try:
            return outcome_of(fault, runner, all_tests)
        finally:
            free.put(runner)

    pool = concurrent.futures.ThreadPoolExecutor(len(runners))
    waiting = {pool.submit(work, fault): fault for fault in faults}
    try:
        for future in concurrent.futures.as_completed(waiting):
            yield waiting[future], future.result()
    finally:
        # Where this is interrupted whoever has the runners ends what they run.
        pool.shutdown(wait=False, cancel_futures=True)


def outcome_of(fault: Fault, runner: Runner, all_tests: bool = False) -> Outcome:
    """Plant one fault and run its tests; then its package's and the whole's, where asked to."""
    try:
        with planted(fault, runner.tree):
            first = runner.run(fault.tests, DEADLINE_S)
            if first.verdict != Verdict.MISSED or not all_tests:
                return first
            later = runner.run(suites_of(fault), SUITES_DEADLINE_S)
    except StaleFaultError as stale:
        return Outcome(Verdict.BROKEN, says=str(stale))
    return attrs.evolve(
        later,
        verdict=Verdict.CAUGHT_LATER if later.verdict.is_caught else later.verdict,
        seconds=first.seconds + later.seconds,
        processor_seconds=first.processor_seconds + later.processor_seconds,
    )


class RunsTests(Protocol):
    """Runs tests up to the first that goes red, such as a `Runner`."""

    def run(self, tests: Sequence[str], deadline_s: float) -> Outcome:
        """Return how they went."""
        ...


def without_the_unsound(
    found: Mapping[Fault, Outcome], runner: RunsTests
) -> Iterator[dict[Fault, Outcome]]:
    """Run the tests that went red once more, on the right text; give what is known as it comes.

    A test that is red there too has seen no fault: what it caught counts as broken.
    """
    known = dict(found)
    caught = (Verdict.CAUGHT, Verdict.CAUGHT_LATER)
    while open_ones := [f for f, o in known.items() if o.verdict in caught and not o.is_sound]:
        named = sorted({known[fault].test for fault in open_ones})[:TESTS_AT_ONCE]
        again = runner.run(named, SOUND_DEADLINE_S)
        if again.verdict != Verdict.MISSED and again.test not in named:
            raise SystemExit(f"the right text could not be tested: {again.test} {again.says}")
        says = f"red on the right text as well: {again.says}"
        for fault in open_ones:
            if again.verdict == Verdict.MISSED and known[fault].test in named:
                known[fault] = attrs.evolve(known[fault], is_sound=True)
            elif again.verdict != Verdict.MISSED and known[fault].test == again.test:
                known[fault] = attrs.evolve(known[fault], verdict=Verdict.BROKEN, says=says)
        yield dict(known)
