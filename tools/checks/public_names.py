"""Import every public name of one package and check that what it lists is there.

``python -m tools.checks.public_names PACKAGE`` walks all modules of the installed package.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib import metadata, resources


def main(package: str) -> int:
    """Check one package by the name of its folder; return the exit code."""
    name = f"trainwright.{package.replace('-', '_')}"
    root = importlib.import_module(name)
    names = [name, *(m.name for m in pkgutil.walk_packages(root.__path__, name + "."))]
    problems = []
    for module_name in names:
        if module_name.endswith("__main__"):
            continue
        module = importlib.import_module(module_name)
        listed = list(getattr(module, "__all__", []))
        problems += [
            f"{module_name}.{n} is listed but missing" for n in listed if not hasattr(module, n)
        ]
    if not getattr(root, "__all__", []):
        problems.append(f"{name} lists no public names")
    if not resources.files(root).joinpath("py.typed").is_file():
        problems.append(f"{name} ships no py.typed")
    distribution = "trainwright" if package == "integration" else f"trainwright-{package}"
    print(f"{distribution} {metadata.version(distribution)}: {len(names)} modules imported")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
