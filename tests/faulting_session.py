"""What tests of faults share in one session: options, a server of ranks, right runs, a table."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import pytest

from tests.faulting import (
    ROOT,
    STEPS,
    Ended,
    Left,
    Server,
    Setting,
    back_to,
    left_by,
    run_apart,
)
from tests.faulting_command import Fault


@attrs.frozen
class Row:
    """What the table tells of a fault: where it was, how it ended and what came of the run."""

    fault: Fault
    setting: Setting
    seconds: float
    after: str


@attrs.frozen
class Undisturbed:
    """A run to which nothing happens: what those have to equal that go on after a fault.

    Args:
        folder: of the run.
        left: what it has left.
        begun: how often each rank came to each moment.
        resumed: the same of a run that went on from the middle.
    """

    folder: Path
    left: Left
    begun: Mapping[int, dict[str, int]]
    resumed: Mapping[int, dict[str, int]]


class UndisturbedRuns(dict[Setting, Undisturbed]):
    """Made when they are first wanted."""

    def __init__(self, server: Server, book: Path, folder: Path) -> None:
        super().__init__()
        self._server = server
        self._book = book
        self._folder = folder

    def __missing__(self, setting: Setting) -> Undisturbed:
        folder = self._folder / f"{setting.layout}-{setting.comm}"
        run, again = folder / "run", folder / "again"
        begun = self._run(setting, ["--data", str(self._book), "--out", str(run)], folder / "begun")
        shutil.copytree(run, again)
        back_to(again, STEPS - 2)
        resumed = self._run(setting, ["--resume", str(again)], folder / "resumed")
        left = left_by(run)
        assert left_by(again) == left
        self[setting] = Undisturbed(run, left, begun.counts, resumed.counts)
        return self[setting]

    def _run(self, setting: Setting, arguments: list[str], folder: Path) -> Ended:
        ended = run_apart(self._server, setting, arguments, folder)
        assert set(ended.codes.values()) == {0}, ended.text
        return ended


TABLE: list[Row] = []
FIGURES: list[str] = []


def add_fault_options(parser: pytest.Parser) -> None:
    """Add what `nox -s faults -- …` may say."""
    group = parser.getgroup("faults")
    group.addoption("--fault-seed", type=int, default=0, help="decides ranks and moments")
    group.addoption("--fault-draws", type=int, default=1, help="how many of each kind")
    group.addoption("--soak-minutes", type=float, default=30.0, help="how long the soak lasts")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "draw_number" in metafunc.fixturenames:
        metafunc.parametrize("draw_number", range(metafunc.config.getoption("fault_draws")))


def print_faults(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table and the figures."""
    if TABLE:
        seed = terminalreporter.config.getoption("fault_seed")
        terminalreporter.section(f"faults, drawn with seed {seed}")
        head = f"{'fault':8}{'moment':>11} {'of':>6}{'rank':>5}  {'layout':16}{'carried by':11}"
        terminalreporter.line(f"{head}{'s to the end':>12}  after it")
        for row in TABLE:
            fault, setting = row.fault, row.setting
            terminalreporter.line(
                f"{fault.kind:8}{fault.moment:>11} {fault.count:6}{fault.rank:5}  "
                f"{setting.layout:16}{setting.comm:11}{row.seconds:12.1f}  {row.after}"
            )
    for line in FIGURES:
        terminalreporter.line(line)


@pytest.fixture(scope="session")
def fault_seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("fault_seed"))


@pytest.fixture(scope="session")
def soak_minutes(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("soak_minutes"))


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_bytes((ROOT / "LICENSE").read_bytes())
    return path


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def undisturbed(
    server: Server, book: Path, tmp_path_factory: pytest.TempPathFactory
) -> UndisturbedRuns:
    return UndisturbedRuns(server, book, tmp_path_factory.mktemp("undisturbed"))
