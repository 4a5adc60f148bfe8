"""Running the tests of a fault, and what their end says about it."""

from __future__ import annotations

import enum
import json
import os
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

_FLAGS = ("-q", "-x", "-c", "pyproject.toml", "-p", "no:cacheprovider", "-p", witness.__name__)


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
        is_sound: whether that test is green on the right text.
    """

    verdict: Verdict
    test: str = ""
    says: str = ""
    seconds: float = 0.0
    processor_seconds: float = 0.0
    is_sound: bool = False


class Runner:
    """Runs tests against the sources of a tree, in forks of a process that waits for requests.

    Args:
        tree: The copy; what is noted on the way lies beside it.
        modules: What is imported once; none of them is in the tree.
    """

    def __init__(self, tree: Path, modules: Sequence[str] = ("numpy", "torch")) -> None:
        self.tree = tree
        self._noted = tree.parent / "witness.jsonl"
        self._log = tree.parent / "pytest.log"
        self._warm = subprocess.Popen(
            [sys.executable, "-m", "tools.mutants.warm", *modules],
            cwd=tree,
            env=_environment(tree, self._noted),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, tests: Sequence[str], deadline_s: float) -> Outcome:
        """Run tests up to the first that goes red."""
        for path in (self._noted, self._log):
            path.unlink(missing_ok=True)
        arguments = [*_FLAGS, "--basetemp", str(self.tree.parent / "temporary"), *tests]
        request = {"arguments": arguments, "deadline_s": deadline_s, "log": str(self._log)}
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        self._warm.stdin.write(json.dumps(request) + "\n")
        self._warm.stdin.flush()
        answer = json.loads(self._warm.stdout.readline())
        lines = self._noted.read_text().splitlines() if self._noted.exists() else []
        output = self._log.read_text(errors="replace") if self._log.exists() else ""
        outcome = judge(int(answer["code"]), [json.loads(line) for line in lines], output)
        seconds, processor_seconds = answer["seconds"], answer["processor_seconds"]
        return attrs.evolve(outcome, seconds=seconds, processor_seconds=processor_seconds)

    def close(self) -> None:
        """End the process, and with it what it runs."""
        self._warm.terminate()
        with self._warm:  # which closes the pipes and waits
            return


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
