"""What became of planted faults: kept in a file, summed up by kind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from tools.mutants.faults import Fault
from tools.mutants.running import Outcome, Verdict

LEAST_CAUGHT = 0.95


def mark(fault: Fault) -> str:
    """Return what changes where the fault does: a result holds for one text and its tests."""
    return hashlib.sha256(repr(attrs.astuple(fault)).encode()).hexdigest()[:16]


def write(path: Path, found: Mapping[Fault, Outcome]) -> None:
    """Write all results, at once or not at all."""
    rows = [
        {"name": fault.name, "mark": mark(fault), "file": fault.file, **attrs.asdict(outcome)}
        for fault, outcome in found.items()
    ]
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(rows, indent=1) + "\n")
    aside.rename(path)


def read(path: Path, faults: Sequence[Fault]) -> dict[Fault, Outcome]:
    """Return the results of faults that were caught and are still what they were."""
    rows = {row["mark"]: row for row in json.loads(path.read_text())}
    fields = [field.name for field in attrs.fields(Outcome)]
    found = {}
    for fault in faults:
        if row := rows.get(mark(fault)):
            values = {name: row[name] for name in fields if name in row}
            outcome = Outcome(**values | {"verdict": Verdict(row["verdict"])})
            if outcome.verdict.is_caught:
                found[fault] = outcome
    return found


def table(kinds: Mapping[str, Sequence[Fault]], found: Mapping[Fault, Outcome]) -> str:
    """Return what was planted and caught of each kind, and the seconds that it took."""
    lines = [f"{'kind':24} planted  caught      %  seconds"]
    for kind, faults in [*kinds.items(), ("together", [f for k in kinds.values() for f in k])]:
        outcomes = [found[fault] for fault in faults if fault in found]
        if not outcomes:
            continue
        caught = sum(outcome.verdict.is_caught for outcome in outcomes)
        share = 100 * caught / len(outcomes)
        seconds = sum(outcome.seconds for outcome in outcomes)
        lines.append(f"{kind:24} {len(outcomes):7} {caught:7} {share:6.1f} {seconds:8.0f}")
    return "\n".join(lines)


def exit_code(found: Mapping[Fault, Outcome], known: Mapping[str, str]) -> int:
    """Return 1 where too few are caught, or one passed by that is not known to."""
    caught = sum(outcome.verdict.is_caught for outcome in found.values())
    unlisted = [
        fault
        for fault, outcome in found.items()
        if not outcome.verdict.is_caught and fault.name not in known
    ]
    return int(caught < LEAST_CAUGHT * len(found) or bool(unlisted))
