"""Plant named faults one by one and print which of them the tests catch.

``python -m tools.mutants [NAME…]`` copies the sources aside, plants one fault in the copy, runs the
tests that should see it against the copy, takes the fault out again and goes on to the next. The
tree itself is not touched. At the end the tests that went red run once more without any fault.
The exit code is 1 where fewer than 95% of the faults are caught, or where one is missed that
`tools.mutants.known_missed` does not list.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.mutants import results
from tools.mutants.catalog import FAULTS, KINDS
from tools.mutants.faults import Fault
from tools.mutants.known_missed import KNOWN_MISSED
from tools.mutants.planting import copies, outcomes, without_the_unsound
from tools.mutants.running import Outcome, Runner


def main(arguments: Sequence[str]) -> int:
    """Plant every fault, or those named; return the exit code."""
    options = _options(arguments)
    chosen = _chosen(options.names)
    if options.list:
        for fault in chosen:
            print(f"{fault.name}  ({fault.file})")
        return 0
    kept = options.out or options.resume
    found = results.read(options.resume, chosen) if options.resume else {}
    left = [fault for fault in chosen if fault not in found]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    aside = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with aside as folder, contextlib.ExitStack() as stack:
        trees = copies(Path(folder), options.workers)
        runners = [stack.enter_context(Runner(tree)) for tree in trees]
        for fault, outcome in outcomes(left, runners, options.all_tests):
            found[fault] = outcome
            print(_line(fault, outcome), flush=True)
            if kept:
                results.write(kept, found)
        for checked in without_the_unsound(found, runners[0]):
            found = checked
            if kept:
                results.write(kept, found)
    print(report(found))
    return results.exit_code(found, KNOWN_MISSED)


def report(found: Mapping[Fault, Outcome]) -> str:
    """Return the table, the slowest ten faults, and all that were not caught, with why."""
    lines = ["", results.table(KINDS, found), "", "the slowest ten:"]
    slowest = sorted(found.items(), key=lambda item: -item[1].seconds)[:10]
    lines += [f"{outcome.seconds:7.1f} s  {fault.name}" for fault, outcome in slowest]
    passed_by = [(fault, o) for fault, o in found.items() if not o.verdict.is_caught]
    lines += ["", "not caught:"] if passed_by else []
    for fault, outcome in passed_by:
        why = KNOWN_MISSED.get(fault.name, "not listed in tools/mutants/known_missed.py")
        lines.append(f"{outcome.verdict:7} {fault.name}: {outcome.says or why}")
    listed = [f.name for f, o in found.items() if o.verdict.is_caught and f.name in KNOWN_MISSED]
    lines += [f"listed as missed, but caught: {name}" for name in listed]
    return "\n".join(lines)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults, or kinds of faults")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    parser.add_argument("--workers", type=int, default=1, help="how many faults at once")
    parser.add_argument("--out", type=Path, help="a file that keeps the results as JSON")
    parser.add_argument(
        "--resume", type=Path, help="keep what such a file has as caught, and go on in it"
    )
    parser.add_argument(
        "--all-tests",
        action="store_true",
        help="where a fault's own tests miss it, run its package's and those of the whole",
    )
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: at least one works")
    if options.resume and not options.resume.is_file():
        parser.error(f"--resume {options.resume}: there is no such file; --out makes one")
    return options


def _chosen(names: Sequence[str]) -> list[Fault]:
    known = {fault.name for fault in FAULTS} | set(KINDS)
    if unknown := set(names) - known:
        listed = ", ".join(map(repr, sorted(unknown)))
        sys.exit(f"no fault and no kind is named {listed}; see --list")
    kinds = {fault: kind for kind, faults in KINDS.items() for fault in faults}
    return [f for f in FAULTS if not names or f.name in names or kinds[f] in names]


def _line(fault: Fault, outcome: Outcome) -> str:
    words = (
        f"{outcome.verdict.split()[0].upper():7}" if not outcome.verdict.is_caught else "caught "
    )
    took = f"{outcome.seconds:6.1f} s {outcome.processor_seconds:6.1f} cpu-s"
    return f"{words} {took}  {fault.name}  [{outcome.says}]"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
