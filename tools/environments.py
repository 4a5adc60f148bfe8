"""The environments of nox sessions: one base with every third-party package, thin ones on top."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

import nox

from tools.figures import Figures, processor_seconds, table

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
PROJECTS = [ROOT / "packages" / name for name in PACKAGES] + [ROOT / "integration"]
WORK = ROOT / ".nox"
TOOLS = ["hatchling>=1.25", "mypy>=1.13", "pytest-xdist>=3.6", "ruff>=0.8"]
DEADLINE_S = {"tests": 600, "integration": 1500, "long": 21600}
FIGURES: dict[str, Figures] = {}
"""What each session took, in the order in which they ran."""
BUILT: dict[Path, Path] = {}


def alone(package: str) -> list[Path]:
    """Return what stands beside a package in its own tests: collectives; all for integration."""
    if package == "integration":
        return PROJECTS
    return [ROOT / "packages" / name for name in dict.fromkeys(["collectives", package])]


def prepare(session: nox.Session, *projects: Path) -> None:
    """Put the base environment under the session's own, and the projects' wheels into it."""
    sites = [str(base(session)), *([str(kept_torch())] if kept_torch() else [])]
    site = session.run(
        "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True
    )
    (Path(str(site).strip()) / "base.pth").write_text("\n".join(sites) + "\n")
    if projects:
        wheels = [str(built(session, project)) for project in projects]
        session.install("--no-deps", "--force-reinstall", "--no-index", *wheels)


def base(session: nox.Session) -> Path:
    """Install every third-party package once and return the site-packages that hold them."""
    wanted = sorted({r for project in PROJECTS for r in requirements(project)} | set(TOOLS))
    if kept_torch():
        wanted = [requirement for requirement in wanted if not requirement.startswith("torch")]
    pins = ROOT / "tools" / "constraints.txt"
    text = "\n".join([sys.version, str(kept_torch()), *wanted, pins.read_text()])
    folder = WORK / f"base-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not (folder / "complete").exists():
        session.run(sys.executable, "-m", "virtualenv", "-q", "--clear", folder, external=True)
        install = [python, "-m", "pip", "install", "-q", "-c", pins, *wanted]
        session.run(*install, external=True)
        (folder / "complete").touch()
    found = next(folder.glob("lib/python*/site-packages"), folder / "Lib" / "site-packages")
    return found


def built(session: nox.Session, project: Path) -> Path:
    """Build a project's wheel once a run and return its path."""
    if project not in BUILT:
        out = WORK / "wheels" / project.name
        for old in out.glob("*.whl"):
            old.unlink()
        command = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out]
        session.run("python", *command, project)
        BUILT[project] = next(out.glob("*.whl"))
    return BUILT[project]


def oldest(project: Path) -> list[str]:
    """Return a project's declared floors of numpy and attrs as exact pins."""
    floors = [r for r in requirements(project) if r.startswith(("numpy", "attrs"))]
    return [requirement.replace(">=", "==") for requirement in floors]


def requirements(project: Path) -> list[str]:
    """Return the third-party requirements that a project declares, those of its tests included."""
    described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    extras = described.get("optional-dependencies", {}).values()
    listed = [*described["dependencies"], *(r for extra in extras for r in extra)]
    return [requirement for requirement in listed if not requirement.startswith("trainwright")]


def kept_torch() -> Path | None:
    """Return where the torch of the interpreter that runs nox lies, if it is new enough."""
    if util.find_spec("torch") is None:
        return None
    major, minor = metadata.version("torch").split(".")[:2]
    found = Path(str(metadata.distribution("torch").locate_file("")))
    return found if (int(major), int(minor)) >= (2, 13) else None


def pytest(session: nox.Session, kind: str, *arguments: str) -> None:
    """Run pytest with the house's options under a deadline; a hang ends with all stacks."""
    told = WORK / "figures.json"
    told.unlink(missing_ok=True)
    under = ["python", "-m", "tools.deadline", "--figures", str(told), str(DEADLINE_S[kind])]
    command = [*under, "python", "-m", "pytest"]
    if kind != "long":  # the tests of the whole start processes of their own
        most = 4 if kind == "tests" else 2
        command += ["-n", str(min(most, os.cpu_count() or 1)), "--dist", "worksteal"]
    named = ["--durations", "10", "--durations-min", "0.5"]
    try:
        session.run(*command, "-q", "-c", "pyproject.toml", *named, *arguments, env=threads())
    finally:
        if told.exists():
            FIGURES[session.name].mebibytes = json.loads(told.read_text())["mebibytes"]


def long_tests(session: nox.Session, expression: str, *paths: str) -> None:
    """Run the tests that an expression of markers chooses, with every project installed."""
    with ready(session, *PROJECTS):
        pytest(session, "long", "-m", expression, *paths, *session.posargs)


def threads() -> dict[str, str]:
    """Return the environment of tests and runs: one thread a rank, for ranks share the cores."""
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@contextlib.contextmanager
def ready(session: nox.Session, *projects: Path) -> Iterator[None]:
    """Prepare a session, and note what it took, also where it fails."""
    began, before = time.perf_counter(), processor_seconds()
    found = FIGURES.setdefault(session.name, Figures())
    try:
        prepare(session, *projects)
        yield
    finally:
        found.seconds = time.perf_counter() - began
        found.processor_seconds = processor_seconds() - before


@atexit.register
def print_table() -> None:
    """Print seconds, seconds of processors and memory of all sessions side by side."""
    if FIGURES:
        print(f"\n{table(FIGURES)}")
