"""``python -m tests.equivalence`` prints the array, ``… make`` searches for it anew."""

from __future__ import annotations

import sys

from tests.equivalence import array, table


def main(arguments: list[str]) -> None:
    """Print the array; search for it before that, or write what the README says of it."""
    if arguments not in ([], ["make"], ["table"]):
        sys.exit(f"unknown {arguments}; nothing, make or table works")
    if arguments == ["make"]:
        entries, impossible = array.made()
        array.write_rows(entries)
        array.write_impossible(impossible)
    if arguments:
        table.write(table.text(array.read_rows(), array.read_impossible()))
    print(array.ROWS.read_text())
    print(array.IMPOSSIBLE.read_text())
    print(table.text(array.read_rows(), array.read_impossible()))


if __name__ == "__main__":
    main(sys.argv[1:])
