"""The house style and the import rule hold, and their checks can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.checks import layers, maxima
from tools.mutants.catalog import FAULTS

ROOT = Path(__file__).parents[1]


def test_no_file_function_class_or_signature_exceeds_its_maximum() -> None:
    assert maxima.main() == 0


def test_no_package_imports_what_the_import_rule_forbids() -> None:
    assert layers.main() == 0


def test_every_planted_fault_stands_in_the_code_exactly_once() -> None:
    counts = {fault.name: (ROOT / fault.file).read_text().count(fault.right) for fault in FAULTS}
    assert set(counts.values()) == {1}, counts
    assert len(counts) == len(FAULTS)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("\n" * 301, "301 lines"),
        ("def f():\n" + "    x = 1\n" * 46, "47 lines"),
        ("def f(a, b, c, d, e, f, g, h, i): ...\n", "9 parameters"),
        ("class C:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(17)), "17 public"),
    ],
)
def test_what_is_too_large_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, word: str
) -> None:
    path = tmp_path / "thing.py"
    path.write_text(text)
    monkeypatch.setattr(maxima, "ROOT", tmp_path)
    assert any(word in problem for problem in maxima.check_file(path))


@pytest.mark.parametrize(
    ("package", "text"),
    [
        ("precision", "from trainwright.sharding import Mesh\n"),
        ("precision", "from trainwright import checkpointing\n"),
        ("collectives", "import pandas\n"),
        ("pipeline-schedules", "import torch\n"),
    ],
)
def test_a_forbidden_import_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, text: str
) -> None:
    project = tmp_path / "packages" / package
    source = project / "src" / "trainwright" / package.replace("-", "_")
    source.mkdir(parents=True)
    (project / "pyproject.toml").write_text(
        (ROOT / "packages" / package / "pyproject.toml").read_text()
    )
    path = source / "thing.py"
    path.write_text(text)
    monkeypatch.setattr(layers, "ROOT", tmp_path)
    assert len(layers.check_file(project, path)) == 1
