"""The import rule: which package may import what.

A package imports the standard library, torch, numpy, attrs and (all but collectives itself)
trainwright.collectives; never another sibling. integration may import every package and what it
declares. In pipeline-schedules torch and collectives are imported by ``execute`` alone. Tests may
import pytest, hypothesis and what the package declares for tests.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FREE_OF_TORCH = ("pipeline-schedules", "execute")
IMPORT_NAMES = {"attrs": ("attrs", "attr"), "PyYAML": ("yaml",)}


def main() -> int:
    """Check every source file; print each breach and return the exit code."""
    breaches = []
    for project in sorted([*ROOT.glob("packages/*"), ROOT / "integration"]):
        for path in sorted(project.rglob("*.py")):
            breaches += check_file(project, path)
        if (project / "src" / "trainwright" / "__init__.py").exists():
            breaches.append(f"{project.name}: trainwright is a namespace, it has no __init__.py")
    for breach in breaches:
        print(breach, file=sys.stderr)
    print(f"import rule: {len(breaches)} breaches")
    return 1 if breaches else 0


def check_file(project: Path, path: Path) -> list[str]:
    """Return the breaches of one file."""
    is_test = path.is_relative_to(project / "tests")
    allowed = declared(project, tests=is_test or "testing" in path.parts or path.stem == "testing")
    breaches = []
    for line, module in imports(path):
        top, *rest = module.split(".")
        where = f"{path.relative_to(ROOT)}:{line}"
        if top == "trainwright":
            sibling = rest[0].replace("_", "-") if rest else ""
            if sibling not in siblings(project):
                breaches.append(f"{where} imports sibling {module}")
        elif top not in allowed and top not in sys.stdlib_module_names:
            breaches.append(f"{where} imports {module}, which {project.name} does not declare")
        if (
            not is_test
            and torch_is_banned(project, path)
            and (top == "torch" or module.startswith("trainwright.collectives"))
        ):
            breaches.append(f"{where} imports {module} in the half that is free of torch")
    return breaches


def siblings(project: Path) -> set[str]:
    """Return the packages a project may import from the namespace, itself included."""
    if project.name == "integration":
        return {"integration", *(path.name for path in ROOT.glob("packages/*"))}
    return {project.name, "collectives"}


def declared(project: Path, tests: bool) -> set[str]:
    """Return the import names of a project's declared dependencies."""
    described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    extras = described.get("optional-dependencies", {})
    listed = list(described["dependencies"])
    for extra, requirements in extras.items():
        if extra != "test" or tests:
            listed += requirements
    names = {re.split(r"[\[><=~! ]", requirement)[0] for requirement in listed}
    return {alias for name in names for alias in IMPORT_NAMES.get(name, (name,))}


def torch_is_banned(project: Path, path: Path) -> bool:
    """Return whether a file belongs to the half of pipeline-schedules that has no torch."""
    name, folder = FREE_OF_TORCH
    return project.name == name and folder not in path.parts and path.stem != folder


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and module of every import of a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module == "trainwright":
                for alias in node.names:
                    yield node.lineno, f"trainwright.{alias.name}"
            else:
                yield node.lineno, module


if __name__ == "__main__":
    sys.exit(main())
