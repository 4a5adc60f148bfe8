"""Build every wheel and check that the packages can be released.

``python -m tools.release [--out DIR]`` checks, for each package: the changelog has a section with
content for the version; a version that is tagged is dated and its files are those of the tag; the
floors on sibling packages are releases, tagged already or in this tree. It then builds all wheels
and prints in which order to tag and publish. It tags and uploads nothing itself.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
SIBLING = re.compile(r"^(trainwright[\w-]*)(?:\[[^\]]*\])?>=([\d.]+)$")


@attrs.frozen
class Project:
    """One distribution of the repository."""

    folder: Path
    name: str
    version: str
    siblings: dict[str, str]

    @property
    def tag(self) -> str:
        """The tag that a release of this version bears."""
        return f"{self.folder.name if self.name != 'trainwright' else self.name}-v{self.version}"


def main(arguments: list[str]) -> int:
    """Check and build; return the exit code."""
    options = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    options.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels")
    out = options.parse_args(arguments).out
    projects = [read(folder) for folder in folders()]
    tags = set(git("tag", "--list").split())
    problems = [p for project in projects for p in check(project, projects, tags)]
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    build(projects, out)
    for project in in_order(projects):
        state = "released" if project.tag in tags else "to tag"
        print(f"{project.tag:36} {state}")
    return 0


def folders() -> list[Path]:
    """Return the folders of all distributions."""
    return [
        *sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml")),
        ROOT / "integration",
    ]


def read(folder: Path) -> Project:
    """Read what a project declares."""
    described = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras = described.get("optional-dependencies", {}).values()
    listed = [*described["dependencies"], *(r for extra in extras for r in extra)]
    found = [match for requirement in listed if (match := SIBLING.match(requirement))]
    siblings = {match.group(1): match.group(2) for match in found}
    return Project(folder, described["name"], described["version"], siblings)


def check(project: Project, projects: list[Project], tags: set[str]) -> list[str]:
    """Return what keeps one project from being released."""
    problems = []
    changelog = (project.folder / "CHANGELOG.md").read_text()
    heading = re.compile(rf"^## {re.escape(project.version)}\b(.*)$", re.MULTILINE)
    match = heading.search(changelog)
    if match is None:
        problems.append(f"{project.name}: CHANGELOG.md has no section for {project.version}")
    else:
        section = changelog[match.end() :].split("\n## ")[0]
        if not re.search(r"^- ", section, re.MULTILINE):
            problems.append(f"{project.name}: the section for {project.version} lists no change")
        if project.tag in tags and "unreleased" in match.group(1):
            problems.append(f"{project.name}: {project.tag} is tagged but marked unreleased")
    if project.tag in tags and git("diff", "--stat", project.tag, "--", f"{project.folder}/src"):
        problems.append(f"{project.name}: changed since {project.tag}; raise the version")
    known = {other.name: other for other in projects}
    for name, floor in project.siblings.items():
        problems += check_floor(project, known[name], floor, tags)
    return problems


def check_floor(project: Project, sibling: Project, floor: str, tags: set[str]) -> list[str]:
    """Return a problem where a floor names no release, tagged or in this tree."""
    numbers = (floor + ".0.0").split(".")[:3]
    version = ".".join(numbers)
    tag = sibling.tag.removesuffix(sibling.version) + version
    if tag in tags or version == sibling.version:
        return []
    return [f"{project.name}: floor {sibling.name}>={floor} is no release; {tag} does not exist"]


def build(projects: list[Project], out: Path) -> None:
    """Build the wheel of every project into ``out``."""
    places = [str(project.folder) for project in projects]
    flags = ["-q", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, *places], check=True)
    print(f"{len(projects)} wheels in {out}")


def in_order(projects: list[Project]) -> list[Project]:
    """Return the projects so that each comes after those it depends on."""
    return sorted(projects, key=lambda project: (len(project.siblings), project.name))


def git(*arguments: str) -> str:
    """Return what a git command prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
