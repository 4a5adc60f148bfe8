"""What a run folder has to tell, read so that no damage of it is in the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.integration.errors import RunFolderError
from trainwright.integration.outside_files import number, parse_json, read_object

Values = NDArray[np.float64]
COLUMNS = ("loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s", "mfu", "memory_bytes")
"""What a line of the metrics may hold of a step, besides its number."""


LARGEST = 1e100
"""What is larger is not drawn."""


@attrs.frozen(eq=False)
class Series:
    """Numbers by step, the steps rising.

    Args:
        steps: step numbers.
        values: one for each; NaN where it was not finite, or is not there.
    """

    steps: Values
    values: Values

    @property
    def finite(self) -> Series:
        """The same without what is not a number, or so large or small that it can't be drawn."""
        sizes = np.abs(self.values)
        kept = (sizes < LARGEST) & ((sizes > 1 / LARGEST) | (sizes == 0))
        return Series(self.steps[kept], self.values[kept])

    def __len__(self) -> int:
        return len(self.steps)


@attrs.frozen(eq=False)
class RunFacts:
    """What is known of a run.

    Args:
        path: its folder.
        settings: by section and name; what is not in a section under "".
        about: what the run said of itself when it began: model, device, schedule.
        columns: of each name in `COLUMNS` the values by step, as the step was made last.
        held_out: the held-out loss by step.
        interventions: what the guards did, oldest first: the journal's entries.
        measurements: what was measured of the ranks, oldest first.
        summary: what the run said when it ended; empty before.
        skipped: steps among them that made no update.
        unreadable: lines that could not be read, by file name.
        written: when the metrics were last written to, in seconds since 1970; None: never.
    """

    path: Path
    settings: Mapping[str, Mapping[str, Any]]
    about: Mapping[str, Any]
    columns: Mapping[str, Series]
    held_out: Series
    interventions: tuple[Mapping[str, Any], ...]
    measurements: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    skipped: int
    unreadable: Mapping[str, int]
    written: float | None

    @property
    def steps_made(self) -> int:
        """The last step there is a line for; 0 where there is none."""
        steps = self.columns["loss"].steps
        return int(steps[-1]) if len(steps) else 0

    @property
    def steps_wanted(self) -> int | None:
        """Steps until the run ends: the updates asked for, and those that were skipped."""
        for section in self.settings.values():
            if 0 <= number(section.get("steps")) < 2**53:
                return int(section["steps"]) + self.skipped
        return None


def read_run(path: Path) -> RunFacts:
    """Read a run folder, of a run under way, finished, killed or damaged alike.

    Raises:
        RunFolderError: there is no run, or it may not be read.
    """
    try:
        return _read_run(path)
    except OSError as error:
        raise RunFolderError(f"cannot read the run in {path}: {error}") from error


def _read_run(path: Path) -> RunFacts:
    metrics = path / "metrics.jsonl"
    if not (path / "config.json").exists() and not metrics.exists():
        raise RunFolderError(f"{path} holds no run: it has neither config.json nor metrics.jsonl")
    unreadable: dict[str, int] = {}
    rows = list(_lines(metrics, unreadable))
    steps = _made_last(row for row in rows if "loss" in row)
    held_out = _made_last(row for row in rows if "held_out_loss" in row)
    return RunFacts(
        path=path,
        settings=_sections(_mapping(path / "config.json", unreadable)),
        about=_mapping(path / "about.json", unreadable),
        columns={name: _series(steps, name) for name in COLUMNS},
        held_out=_series(held_out, "held_out_loss").finite,
        interventions=tuple(_lines(path / "journal.jsonl", unreadable)),
        measurements=tuple(_lines(path / "measured.jsonl", unreadable)),
        summary=_mapping(path / "summary.json", unreadable),
        skipped=sum(row.get("verdict") == "SKIP" or row.get("skipped") is True for row in steps),
        unreadable=unreadable,
        written=metrics.stat().st_mtime if metrics.exists() else None,
    )


def _made_last(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows by step; one that was made again after a rollback as it was made last."""
    found = {row["step"]: row for row in rows}
    return [found[step] for step in sorted(found)]


def _series(rows: list[dict[str, Any]], name: str) -> Series:
    steps = np.array([row["step"] for row in rows], dtype=float)
    return Series(steps, np.array([number(row.get(name)) for row in rows], dtype=float))


def _lines(path: Path, unreadable: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file that have a step, one a line; count what is none."""
    if not path.is_file():
        return
    with path.open(errors="replace") as file:
        for line in file:
            try:
                row = parse_json(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and 0 <= number(row.get("step")) < 2**53:
                yield row
            else:
                unreadable[path.name] = unreadable.get(path.name, 0) + 1


def _mapping(path: Path, unreadable: dict[str, int]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return read_object(path)
    except (OSError, ValueError):
        unreadable[path.name] = 1
        return {}


def _sections(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    top = {name: value for name, value in settings.items() if not isinstance(value, dict)}
    sections = {name: value for name, value in settings.items() if isinstance(value, dict)}
    return {**({"": top} if top else {}), **sections}
