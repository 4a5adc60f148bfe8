"""Plant named faults one by one and print which of them the tests catch.

``python -m tools.mutants [NAME…]`` copies the sources aside, plants one fault in the copy, runs the
tests that should see it against the copy, and goes on to the next. The tree itself is not touched.
A fault that no test sees makes the exit code 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.mutants.catalog import FAULTS
from tools.mutants.faults import Fault

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0
PASSED, FAILED, HUNG = 0, 1, 124


def main(names: list[str]) -> int:
    """Plant every fault, or those named; return the exit code."""
    if unknown := set(names) - {fault.name for fault in FAULTS}:
        sys.exit(f"no fault is named {', '.join(map(repr, sorted(unknown)))}; see tools/mutants")
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    missed = []
    for fault in chosen:
        start = time.perf_counter()
        caught = is_caught(fault)
        seconds = time.perf_counter() - start
        print(f"{'caught' if caught else 'MISSED':7} {seconds:6.1f} s  {fault.name}", flush=True)
        if not caught:
            missed.append(fault)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} planted faults caught")
    return 1 if missed else 0


def is_caught(fault: Fault) -> bool:
    """Plant one fault in a copy of the tree; return whether its tests go red."""
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        plant(fault, tree)
        code = run(tree, fault.tests)
    if code not in (PASSED, FAILED, HUNG):
        sys.exit(f"fault {fault.name}: its tests could not be run (exit code {code})")
    return code != PASSED


def copy_tree(folder: Path) -> Path:
    """Copy sources and tests, and nothing that was built."""
    tree = folder / "tree"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "dist", "build", "runs")
    shutil.copytree(ROOT, tree, ignore=ignored)
    return tree


def plant(fault: Fault, tree: Path) -> None:
    """Replace the fault's text in its file.

    Raises:
        SystemExit: the text is not there exactly once: the code has moved on, so must the fault.
    """
    path = tree / fault.file
    text = path.read_text()
    if text.count(fault.right) != 1:
        sys.exit(f"fault {fault.name}: its text stands {text.count(fault.right)} times in the file")
    path.write_text(text.replace(fault.right, fault.wrong))


def run(tree: Path, tests: tuple[str, ...]) -> int:
    """Run tests against the sources of ``tree``; return the exit code."""
    roots = [*tree.glob("packages/*/src"), tree / "integration" / "src"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(root) for root in roots)}
    command = ["-m", "tools.deadline", str(DEADLINE_S), sys.executable, "-m", "pytest"]
    flags = ["-q", "-x", "-c", "pyproject.toml", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, *command, *flags, *tests],
        cwd=tree,
        env=environment,
        capture_output=True,
        check=False,
    )
    if done.returncode not in (PASSED, FAILED):
        print(done.stdout.decode()[-2000:], file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
