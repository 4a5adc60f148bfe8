"""The matrix: every package alone, then the whole. ``nox --list`` is the manual."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from tools.environments import PACKAGES, PROJECTS, alone, long_tests, oldest, pytest, ready, threads

EVERYTHING = [*PACKAGES, "integration"]
NAMED = bool({"-s", "--session", "--sessions", "-e"} & set(sys.argv))

nox.options.default_venv_backend = "virtualenv"
nox.options.stop_on_first_error = True


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """Run one package's tests where only it and collectives are installed."""
    with ready(session, *alone(package)):
        pytest(session, "tests", f"packages/{package}/tests", *session.posargs)


@nox.session
def layers(session: nox.Session) -> None:
    """Check that no package imports a sibling, or a library it does not declare."""
    with ready(session):
        session.run("python", "-m", "tools.checks.layers")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff, and the maxima of the house style."""
    with ready(session):
        session.run("python", "-m", "ruff", "check", ".")
        session.run("python", "-m", "ruff", "format", "--check", ".")
        session.run("python", "-m", "tools.checks.maxima")


@nox.session
def types(session: nox.Session) -> None:
    """Check all annotations with mypy, strictly."""
    with ready(session):
        roots = os.pathsep.join(str(project / "src") for project in PROJECTS)
        names = [f"trainwright.{name.replace('-', '_')}" for name in EVERYTHING]
        flags = [flag for name in names for flag in ("-p", name)]
        session.run("python", "-m", "mypy", *flags, env={"MYPYPATH": roots})


@nox.session
@nox.parametrize("package", EVERYTHING, ids=EVERYTHING)
def wheel(session: nox.Session, package: str) -> None:
    """Build one wheel, install it alone, import every public name and run its READMEs' code."""
    folder = "integration" if package == "integration" else f"packages/{package}"
    with ready(session, *alone(package)):
        session.run("python", "-m", "tools.checks.public_names", package)
        session.run("python", "-m", "tools.checks.readme", folder)


@nox.session
def integration(session: nox.Session) -> None:
    """Run the tests of the whole: the sampled law, faults and the command line."""
    with ready(session, *PROJECTS):
        pytest(session, "integration", "integration/tests", "tests", *session.posargs)


@nox.session
def train(session: nox.Session) -> None:
    """Train the tiny model with data 2 x tensor 2 x pipeline 2; 20 steps where not named by -s."""
    with ready(session, *PROJECTS):
        smoke = ["--steps", "20", "--evaluate-sequences", "32", "--out", session.create_tmp()]
        full = ["--steps", "330", "--lr", "5e-3", "--warmup", "30"]
        chosen = ["--layout", "dp=2,tp=2,pp=2", *(full if NAMED else smoke)]
        if "--resume" in session.posargs:
            chosen = []
        session.run("trainwright", "train", *chosen, *session.posargs, env=threads())


@nox.session(default=False)
def matrix(session: nox.Session) -> None:
    """Run the law whole: the covering array, every layout of up to eight ranks, long tests."""
    long_tests(session, "not fault and not fuzz", "tests", "-n", "2", "--dist", "worksteal")


@nox.session(default=False)
def faults(session: nox.Session) -> None:
    """Kill, stop, starve and cut off real processes at drawn moments, then a soak of 30 minutes."""
    long_tests(session, "fault", "tests")


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Give every reader of outside bytes 100,000 damaged inputs."""
    long_tests(session, "fuzz", "tests", "-n", "2", "--dist", "worksteal")


@nox.session(default=False)
def kills(session: nox.Session) -> None:
    """Kill runs at many moments, resume them, and compare with runs that were never stopped."""
    long_tests(session, "long", "integration/tests")


@nox.session(default=False)
def trainings(session: nox.Session) -> None:
    """Train on real text in every number format, and run the long tests of all packages."""
    long_tests(session, "long", *(f"packages/{package}/tests" for package in PACKAGES))


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Plant named faults one by one and print which of them the tests catch."""
    with ready(session):
        session.run("python", "-m", "tools.mutants", *session.posargs, env=threads())


@nox.session(default=False)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def floors(session: nox.Session, package: str) -> None:
    """Run one package's tests on the oldest numpy and attrs that it declares."""
    with ready(session, *alone(package)):
        session.install("--ignore-installed", *oldest(ROOT / "packages" / package))
        pytest(session, "tests", f"packages/{package}/tests", *session.posargs)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build all wheels and check that versions, changelogs and declared floors are in order."""
    with ready(session):
        session.run("python", "-m", "tools.release", *session.posargs)
