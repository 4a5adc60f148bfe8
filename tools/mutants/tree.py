"""A copy of the sources in which faults are planted, one at a time."""

from __future__ import annotations

import compileall
import contextlib
import io
import py_compile
import shutil
from collections.abc import Iterator
from pathlib import Path

from tools.mutants.faults import Fault

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "dist", "build", "runs")


class StaleFaultError(Exception):
    """A fault's text is not in its file exactly once: the code has moved on, so must the fault."""


def copy_sources(folder: Path, root: Path = ROOT) -> Path:
    """Copy sources and tests, and nothing that was built, and compile them once.

    What is compiled names the hash of its source, not the time of its last change: a fault may be
    as long as the right text and stand there in the same second.
    """
    tree = folder / "tree"
    shutil.copytree(root, tree, ignore=LEFT_OUT)
    with contextlib.redirect_stdout(io.StringIO()):
        compileall.compile_dir(
            tree, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
        )
    return tree


def count_text(fault: Fault, tree: Path = ROOT) -> int:
    """Return how often the fault's text stands in its file."""
    path = tree / fault.file
    return path.read_text().count(fault.right) if path.is_file() else 0


@contextlib.contextmanager
def planted(fault: Fault, tree: Path) -> Iterator[None]:
    """Have the fault in the tree for a while.

    Raises:
        StaleFaultError: its text is not there exactly once.
    """
    if (times := count_text(fault, tree)) != 1:
        raise StaleFaultError(f"the text of {fault.name!r} stands {times} times in {fault.file}")
    path = tree / fault.file
    text = path.read_text()
    path.write_text(text.replace(fault.right, fault.wrong))
    try:
        yield
    finally:
        path.write_text(text)
