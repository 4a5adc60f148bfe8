"""``python -m tests.equivalence`` prints the array.

With ``make`` it is searched for first, beginning with the rows that there are, with ``anew`` with
none; both write files and README. With ``table`` only the README is written.
"""

from __future__ import annotations

import sys

from tests.equivalence import array, table


def main(arguments: list[str]) -> None:
    """Print the array; search for it before that, or write what the README says of it."""
    if arguments not in ([], ["make"], ["anew"], ["table"]):
        sys.exit(f"unknown {arguments}; nothing, make, anew or table works")
    if arguments in (["make"], ["anew"]):
        known = array.read_rows() if arguments == ["make"] else []
        entries, impossible = array.made([entry.row for entry in known])
        array.write_rows(entries)
        array.write_impossible(impossible)
    if arguments:
        table.write(table.text(array.read_rows(), array.read_impossible()))
    print(array.ROWS.read_text())
    print(array.IMPOSSIBLE.read_text())
    print(table.text(array.read_rows(), array.read_impossible()))


if __name__ == "__main__":
    main(sys.argv[1:])
