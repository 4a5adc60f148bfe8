"""Run the Python code of READMEs, block after block, each in a namespace of its own.

``python -m tools.checks.readme FOLDER`` runs every README.md in a package's folder; it fails where
a block raises, and where a README is longer than 80 lines.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MAX_LINES = 80
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main(path: Path) -> int:
    """Run every block of ``path``; return the exit code."""
    text = path.read_text()
    blocks = [
        (text[: match.start(1)].count("\n"), match.group(1)) for match in BLOCK.finditer(text)
    ]
    if not blocks:
        print(f"{path}: no ```python block to run", file=sys.stderr)
        return 1
    if text.count("\n") > MAX_LINES:
        print(f"{path}: {text.count(chr(10))} lines, at most {MAX_LINES}", file=sys.stderr)
        return 1
    # Blocks that start processes import the module again, so it needs the name of a real one.
    namespace: dict[str, object] = {"__name__": "__readme__"}
    for line, code in blocks:
        # The line numbers of an error are those of the README.
        exec(compile("\n" * line + code, str(path), "exec"), namespace)
    print(f"{path}: {len(blocks)} blocks ran")
    return 0


if __name__ == "__main__":
    sys.exit(max(main(path) for path in sorted(Path(sys.argv[1]).rglob("README.md"))))
