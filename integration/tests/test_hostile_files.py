"""Files that others have written, damaged or made to harm: refused in words, at little cost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainwright.integration.errors import RunFolderError
from trainwright.integration.outside_files import read_object, read_text
from trainwright.integration.report import page, read_run
from trainwright.integration.run_folder import RunFolder

DEEP = "[" * 9_000


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\xff", "utf-8"),
        (b"[]", "must hold a JSON object, got list"),
        (DEEP.encode(), "nested too deep"),
        (b'{"a": 1' + b"0" * 5_000 + b"}", "integer string conversion"),
        (b" " * 101, "longer than 100 bytes"),
    ],
)
def test_what_is_no_object_is_refused_for_a_reason(
    tmp_path: Path, content: bytes, word: str
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=word):
        read_object(path, 100 if content.isspace() else 1 << 20)


def test_what_never_ends_is_not_read(tmp_path: Path) -> None:
    # A pipe that nobody writes to would be waited for.
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(ValueError, match="no regular file"):
            read_text(tmp_path / name)


def test_lines_of_metrics_that_no_run_wrote_are_passed_over(tmp_path: Path) -> None:
    lines = [
        json.dumps({"step": 1, "loss": 2.0}),
        DEEP,
        '{"step": "2", "loss": 1.0}',
        '{"step": 1' + "0" * 400 + ', "loss": 1.0}',
        '{"step": -1, "loss": 1.0}',
        '{"step": true, "loss": 1.0}',
        "null",
        json.dumps({"step": 3, "loss": "low"}),
        json.dumps({"step": 2, "loss": 1.0}),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    folder = RunFolder(tmp_path)

    steps, losses = folder.losses()

    assert steps == [1, 2, 3]
    assert losses[:2] == [2.0, 1.0]
    assert losses[2] != losses[2]
    assert read_run(tmp_path).unreadable == {"metrics.jsonl": 6}
    assert "6 unreadable lines" in page(read_run(tmp_path))
    folder.rewind(2)
    assert folder.losses() == ([1, 2], [2.0, 1.0])


def test_the_identity_of_a_run_is_read_or_refused(tmp_path: Path) -> None:
    for content in ("", "[]", "{}", DEEP, '{"run": "a"}', "\ud800"):
        (tmp_path / "run.json").write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(RunFolderError, match="cannot read whose run"):
            RunFolder(tmp_path).identity()
