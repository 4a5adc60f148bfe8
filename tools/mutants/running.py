"""Running the tests of a fault, and what their end says about it."""

from __future__ import annotations

import enum
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs

from tools.mutants import witness
from tools.mutants.faults import Fault

PASSED, FAILED, HUNG = 0, 1, 124
CRASHES = (
    "AttributeError",
    "ImportError",
    "IndentationError",
    "ModuleNotFoundError",
    "NameError",
    "SyntaxError",
    "TypeError",
    "UnboundLocalError",
)
"""Errors that any line of nonsense makes: a fault that raises one proves nothing of the tests."""

_FIGURES = re.compile(r"^wall ([\d.]+) s, processors ([\d.]+) s", re.MULTILINE)


class Verdict(enum.StrEnum):
    """What became of a fault."""

    CAUGHT = "caught"
    CAUGHT_LATER = "caught by the suites"
    HUNG = "hung"
    MISSED = "missed"
    BROKEN = "broken"

    @property
    def is_caught(self) -> bool:
        """Whether a test noticed the fault; one that hangs is ended by its deadline, and is red."""
        return self in (Verdict.CAUGHT, Verdict.CAUGHT_LATER, Verdict.HUNG)


@attrs.frozen
class Outcome:
    """How tests went.

    Args:
        verdict: of the fault that was planted while they ran.
        test: the test that went red first, if one did.
        says: the first line of its error.
        seconds: by the clock.
        processor_seconds: of all processes.
    """

    verdict: Verdict
    test: str = ""
    says: str = ""
    seconds: float = 0.0
    processor_seconds: float = 0.0


def run_tests(tree: Path, tests: Sequence[str], deadline_s: float) -> Outcome:
    """Run tests against the sources of ``tree`` up to the first that goes red."""
    noted = tree.parent / "witness.jsonl"
    noted.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, *_command(tree, deadline_s), *tests],
        cwd=tree,
        env=_environment(tree, noted),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    lines = noted.read_text().splitlines() if noted.exists() else []
    outcome = judge(done.returncode, [json.loads(line) for line in lines], done.stdout)
    wall, processors = (_FIGURES.findall(done.stdout) or [(0.0, 0.0)])[-1]
    return attrs.evolve(outcome, seconds=float(wall), processor_seconds=float(processors))


def judge(code: int, failures: Sequence[dict[str, object]], output: str) -> Outcome:
    """Tell from pytest's exit code, and from what went red, what became of a fault."""
    if code == PASSED:
        return Outcome(Verdict.MISSED)
    if code == HUNG:
        return Outcome(Verdict.HUNG, says="its tests did not end within their deadline")
    if code != FAILED or not failures:
        last = (output.strip() or "nothing was printed").splitlines()[-3:]
        return Outcome(Verdict.BROKEN, says=f"exit code {code}: {' | '.join(last)}")
    first = failures[0]
    test, says = str(first["test"]), str(first["says"])
    errors = first["errors"]
    assert isinstance(errors, list)
    crashed = any(name in errors or f"{name}:" in says for name in CRASHES)
    if crashed or first["while"] == "collect":
        return Outcome(Verdict.BROKEN, test, says)
    return Outcome(Verdict.CAUGHT, test, says)


def suites_of(fault: Fault) -> tuple[str, ...]:
    """Return the tests of the package in which a fault lies, and the sampled matrix."""
    first, name, *_ = Path(fault.file).parts
    package = f"packages/{name}/tests" if first == "packages" else "integration/tests"
    return (package, "tests")


def _command(tree: Path, deadline_s: float) -> list[str]:
    under_deadline = ["-m", "tools.deadline", str(deadline_s), sys.executable]
    pytest = ["-m", "pytest", "-q", "-x", "-c", "pyproject.toml", "-p", "no:cacheprovider"]
    aside = ["-p", witness.__name__, "--basetemp", str(tree.parent / "temporary")]
    return [*under_deadline, *pytest, *aside]


def _environment(tree: Path, noted: Path) -> dict[str, str]:
    roots = [*sorted(tree.glob("packages/*/src")), tree / "integration" / "src", tree]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(str(root) for root in roots),
        # What is compiled is compiled once, for the right text.
        "PYTHONDONTWRITEBYTECODE": "1",
        # Drawn examples are the same in every run.
        "CI": "1",
        witness.WRITES_TO: str(noted),
    }
