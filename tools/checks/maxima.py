"""The maxima of the house style: file, function, class and signature sizes.

They hold for every source file without exemptions; tests may be longer files, not wider ones.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 45
MAX_PUBLIC_METHODS = 16
MAX_PARAMETERS = 8
BAD_NAMES = {"utils", "helpers", "common", "engine", "manager"}


def main() -> int:
    """Check every file; print what is too large and return the exit code."""
    problems = [p for path in source_files() for p in check_file(path)]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"house style: {len(problems)} maxima broken")
    return 1 if problems else 0


def source_files() -> list[Path]:
    """Return the Python files that the house writes, tests left out."""
    folders = [*ROOT.glob("packages/*/src"), ROOT / "integration" / "src", ROOT / "tools"]
    found = [path for folder in folders for path in folder.rglob("*.py")]
    return sorted([*found, ROOT / "noxfile.py"])


def check_file(path: Path) -> Iterator[str]:
    """Yield the problems of one file."""
    text = path.read_text()
    where = path.relative_to(ROOT)
    if text.count("\n") > MAX_FILE_LINES:
        yield f"{where}: {text.count(chr(10))} lines, at most {MAX_FILE_LINES}"
    if path.stem in BAD_NAMES:
        yield f"{where}: name the file for its idea"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _check_function(f"{where}:{node.lineno} {node.name}", node)
        elif isinstance(node, ast.ClassDef):
            count = sum(
                isinstance(n, ast.FunctionDef)
                and not n.name.startswith("_")
                and not _is_property(n)
                for n in node.body
            )
            if count > MAX_PUBLIC_METHODS:
                yield f"{where}:{node.lineno} {node.name}: {count} public methods"


def _check_function(where: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    doc = ast.get_docstring(node, clean=False)
    if doc:
        lines -= doc.count("\n") + 1
    if lines > MAX_FUNCTION_LINES:
        yield f"{where}: {lines} lines, at most {MAX_FUNCTION_LINES}"
    names = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    count = len([name for name in names if name not in ("self", "cls")])
    if count > MAX_PARAMETERS:
        yield f"{where}: {count} parameters, at most {MAX_PARAMETERS}"


def _is_property(node: ast.FunctionDef) -> bool:
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(name == "property" or name.endswith("setter") for name in names)


if __name__ == "__main__":
    sys.exit(main())
