"""Planted faults are caught by tests that see them, and by nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest

from tools.figures import Figures
from tools.figures import table as table_of_sessions
from tools.mutants import results
from tools.mutants.catalog import FAULTS, KINDS
from tools.mutants.faults import Fault
from tools.mutants.known_missed import KNOWN_MISSED
from tools.mutants.planting import outcome_of, without_the_unsound
from tools.mutants.running import Outcome, Runner, Verdict, judge
from tools.mutants.tree import copy_sources

ROOT = Path(__file__).parents[1]
CAUGHT = Outcome(Verdict.CAUGHT, "tests/test_sum.py::test_a", "AssertionError", 2.0, 1.0)
MISSED = Outcome(Verdict.MISSED, seconds=3.0)

SOURCE = "def total(values):\n    return sum(values)\n"
TEST = """
from sums import total

def test_the_total_of_two_is_their_sum():
    assert total([1, 2]) == 3
"""


def _fault(wrong: str) -> Fault:
    return Fault(f"wrong: {wrong}", "sums.py", "sum(values)", wrong, ("tests",))


def test_what_a_fault_does_to_its_tests_is_told_apart(tmp_path: Path) -> None:
    tree = tmp_path / "root"
    (tree / "tests").mkdir(parents=True)
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tree / "sums.py").write_text(SOURCE)
    (tree / "tests" / "test_sum.py").write_text(TEST)
    shutil.copytree(ROOT / "tools" / "mutants", tree / "tools" / "mutants")
    copy = copy_sources(tmp_path / "copy", tree)
    faults = {
        _fault("sum(values[:1])"): Verdict.CAUGHT,
        _fault("sum(values[:2])"): Verdict.MISSED,
        _fault("sum(value)"): Verdict.BROKEN,
        attrs.evolve(_fault("0"), right="no such text"): Verdict.BROKEN,
    }

    with Runner(copy, modules=()) as runner:
        found = {fault: outcome_of(fault, runner) for fault in faults}

    assert {fault: outcome.verdict for fault, outcome in found.items()} == faults, found
    assert (copy / "sums.py").read_text() == SOURCE


class RedWithoutFault:
    """Runs nothing: one test is red."""

    def __init__(self, red: str) -> None:
        self.red = red

    def run(self, tests: Sequence[str], deadline_s: float) -> Outcome:
        return Outcome(Verdict.CAUGHT, self.red) if self.red in tests else MISSED


def test_a_test_that_is_red_without_a_fault_has_caught_none() -> None:
    first, second, third = (_fault(str(number)) for number in range(3))
    found = {first: CAUGHT, second: attrs.evolve(CAUGHT, test="test_b"), third: MISSED}

    *_, last = without_the_unsound(found, RedWithoutFault("test_b"))

    assert {f.wrong: (o.verdict, o.is_sound) for f, o in last.items()} == {
        "0": (Verdict.CAUGHT, True),
        "1": (Verdict.BROKEN, False),
        "2": (Verdict.MISSED, False),
    }


class SeesLater:
    """Misses what a fault's own tests are to see, and finds it in suites."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.asked: list[tuple[str, ...]] = []

    def run(self, tests: Sequence[str], deadline_s: float) -> Outcome:
        self.asked.append(tuple(tests))
        return MISSED if len(self.asked) == 1 else CAUGHT


def test_what_its_own_tests_miss_is_looked_for_by_the_suites(tmp_path: Path) -> None:
    path = tmp_path / "packages" / "sums" / "src" / "sums.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    fault = attrs.evolve(_fault("0"), file=str(path.relative_to(tmp_path)))
    runner = SeesLater(tmp_path)

    found = outcome_of(fault, runner, all_tests=True)

    assert runner.asked == [("tests",), ("packages/sums/tests", "tests")]
    assert (found.verdict, found.seconds) == (Verdict.CAUGHT_LATER, 5.0)
    assert outcome_of(fault, SeesLater(tmp_path)).verdict is Verdict.MISSED


@pytest.mark.parametrize(
    ("code", "failure", "verdict"),
    [
        (0, {}, Verdict.MISSED),
        (1, {"while": "call", "errors": ["AssertionError"]}, Verdict.CAUGHT),
        (1, {"while": "call", "errors": ["NameError", "PeerFailedError"]}, Verdict.BROKEN),
        (1, {"while": "call", "errors": ["E"], "says": "E: TypeError: no"}, Verdict.BROKEN),
        (1, {"while": "collect", "errors": ["ValueError"]}, Verdict.BROKEN),
        (1, {}, Verdict.BROKEN),
        (2, {"while": "collect", "errors": ["SyntaxError"]}, Verdict.BROKEN),
        (5, {}, Verdict.BROKEN),
        (-11, {}, Verdict.BROKEN),
        (124, {}, Verdict.HUNG),
    ],
)
def test_only_a_test_that_says_what_is_wrong_has_caught_a_fault(
    code: int, failure: dict[str, object], verdict: Verdict
) -> None:
    failures = [{"test": "tests/test_sum.py::test_a", "says": "", **failure}] if failure else []

    assert judge(code, failures, "").verdict is verdict


def test_results_stay_of_faults_that_were_caught_and_are_still_the_same(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first, second, third = (_fault(str(number)) for number in range(3))
    results.write(path, {first: CAUGHT, second: CAUGHT, third: MISSED})

    found = results.read(path, [first, attrs.evolve(second, wrong="4"), third, _fault("3")])

    assert found == {first: CAUGHT}


@pytest.mark.parametrize(
    ("caught", "missed", "is_known", "code"),
    [(20, 0, False, 0), (19, 1, True, 0), (19, 1, False, 1), (18, 2, True, 1)],
)
def test_a_run_fails_where_a_miss_is_not_known_or_they_are_too_many(
    caught: int, missed: int, is_known: bool, code: int
) -> None:
    found = {_fault(str(number)): CAUGHT for number in range(caught)}
    passed_by = [_fault(str(-number)) for number in range(1, missed + 1)]
    found.update(dict.fromkeys(passed_by, MISSED))
    known = {fault.name: "why" for fault in passed_by} if is_known else {}

    assert results.exit_code(found, known) == code


def test_a_table_counts_each_kind() -> None:
    one, two, three = (_fault(str(number)) for number in range(3))

    lines = results.table({"a": [one, two], "b": [three], "c": []}, {one: CAUGHT, two: MISSED})

    assert [line.split() for line in lines.splitlines()[1:]] == [
        ["a", "2", "1", "50.0", "5"],
        ["together", "2", "1", "50.0", "5"],
    ]


def test_each_fault_has_a_name_of_its_own_tests_that_exist_and_a_reason_where_it_is_missed() -> (
    None
):
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 100
    assert not set(names) & set(KINDS)
    assert {path for path in (f.tests[0] for f in FAULTS) if not (ROOT / path).is_file()} == set()
    assert all(fault.right != fault.wrong for fault in FAULTS)
    assert set(KNOWN_MISSED) <= set(names)
    assert all(len(why.split()) > 5 for why in KNOWN_MISSED.values())


def test_what_a_command_took_is_told_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"

    command = ["-m", "tools.deadline", "--figures", str(path), "60", sys.executable, "-c", "1 + 1"]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )

    found = Figures(**json.loads(path.read_text()))
    assert done.returncode == 0
    assert found.processor_seconds > 0
    assert found.mebibytes > 1
    assert "largest process" in done.stdout
    lines = table_of_sessions({"tests": found, "lint": Figures(2.0, 1.0)}).splitlines()
    assert [line.split()[0] for line in lines] == ["session", "tests", "lint", "together"]
    assert lines[2].split() == ["lint", "2.0", "1.0", "-"]
