"""What offloaded steps take beside what they must: ``python -m tools.bench.offload``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tools.bench import machine
from tools.bench.offload.bounds import table
from tools.bench.offload.measure import Sizes, measure
from tools.bench.rounds import Spread
from tools.bench.table import format_table


def main(words: Sequence[str]) -> int:
    """Time all contestants in rounds; return the exit code, 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.offload")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--folder", help="of the file (default: one of its own)")
    parser.add_argument("--json", action="store_true", help="print all as data")
    parser.add_argument("--bounds", action="store_true", help="time nothing: print who holds what")
    chosen = parser.parse_args(words)
    if min(chosen.rounds, chosen.layers, chosen.width, chosen.tokens) < 1:
        parser.error("counts must be positive")
    sizes = Sizes(chosen.layers, chosen.width, chosen.tokens)
    if chosen.bounds:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            print(table(sizes, folder))
        return 0
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        rows = measure(sizes, chosen.rounds, folder)
    if chosen.json:
        print(json.dumps(rows, indent=1))
    else:
        print(machine.describe())
        print(_describe(rows))
    return 0 if all(row["met"] is not False for row in rows) else 1


def _describe(rows: Sequence[dict[str, Any]]) -> str:
    told = {True: "met", False: "MISSED", None: ""}
    return format_table(
        ["", "ratio", "at most", "", "ms", "against"],
        [
            [
                row["name"],
                Spread.of(row["ratios"]).format(),
                "" if row["most"] is None else f"{row['most']:.2f}",
                told[row["met"]],
                f"{1e3 * Spread.of(row['seconds']).median:.0f}",
                row["against"],
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
