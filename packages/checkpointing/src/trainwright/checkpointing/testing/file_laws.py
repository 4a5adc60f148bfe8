"""The laws of `Files` that can be seen without a crash; `CrashingFiles` shows the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainwright.checkpointing.protocol import Files


def law_what_was_written_is_read_at_any_offset(files: Files, root: Path) -> None:
    """Parts written one after the other are one file."""
    _write(files, root / "a", b"0123", b"", b"456789")
    reader = files.open(root / "a")
    buffer = bytearray(4)
    assert reader.size == files.size(root / "a") == 10
    assert reader.read_into(3, memoryview(buffer)) == 4
    assert buffer == b"3456"
    assert reader.read_into(8, memoryview(buffer)) == 2
    assert reader.read_into(10, memoryview(buffer)) == 0
    assert buffer == b"8956"
    reader.close()


def law_a_view_shows_what_was_written_and_ends_with_the_file(files: Files, root: Path) -> None:
    """A view may be longer than its reader lives."""
    _write(files, root / "a", bytes(range(256)) * 100)
    _write(files, root / "empty")
    reader, empty = files.open(root / "a"), files.open(root / "empty")
    seen = [reader.view(*place) for place in ((0, 3), (5000, 10), (25590, 20), (25600, 5), (7, 0))]
    assert len(empty.view(0, 5)) == 0
    reader.close()
    empty.close()
    assert [bytes(view) for view in seen] == [
        bytes([0, 1, 2]),
        bytes(range(136, 146)),
        bytes(range(246, 256)),
        b"",
        b"",
    ]


def law_a_file_is_not_created_twice(files: Files, root: Path) -> None:
    """Nothing that is there is ever overwritten."""
    _write(files, root / "a", b"first")
    assert _raises(FileExistsError, lambda: files.create(root / "a"))
    assert files.size(root / "a") == 5


def law_folders_are_made_with_their_parents_and_kept(files: Files, root: Path) -> None:
    """Making a folder again changes nothing."""
    files.make_folder(root / "x" / "y")
    _write(files, root / "x" / "y" / "a", b"1")
    files.make_folder(root / "x" / "y")
    assert files.names(root / "x" / "y") == ["a"]
    assert files.names(root) == ["x"]


def law_a_rename_moves_all_that_is_in_a_folder(files: Files, root: Path) -> None:
    """The old name is gone, and no folder takes the place of another."""
    files.make_folder(root / "old")
    _write(files, root / "old" / "a", b"1")
    files.rename(root / "old", root / "new")
    assert files.names(root) == ["new"]
    assert files.size(root / "new" / "a") == 1
    files.make_folder(root / "empty")
    assert _raises(FileExistsError, lambda: files.rename(root / "new", root / "empty"))


def law_a_removed_folder_is_gone(files: Files, root: Path) -> None:
    """What is not there can be removed as well."""
    files.make_folder(root / "x")
    _write(files, root / "x" / "a", b"1")
    files.remove_folder(root / "x")
    files.remove_folder(root / "x")
    assert files.names(root) == []


def law_what_is_not_there_is_said_so(files: Files, root: Path) -> None:
    """A missing file is an error, a missing folder has no names."""
    assert files.names(root / "none") == []
    assert _raises(FileNotFoundError, lambda: files.open(root / "none"))
    assert _raises(FileNotFoundError, lambda: files.size(root / "none"))
    assert _raises(FileNotFoundError, lambda: files.create(root / "none" / "a"))
    free = files.free_bytes(root)
    assert free is None or free > 0


FILES_LAWS: tuple[Callable[[Files, Path], None], ...] = (
    law_what_was_written_is_read_at_any_offset,
    law_a_view_shows_what_was_written_and_ends_with_the_file,
    law_a_file_is_not_created_twice,
    law_folders_are_made_with_their_parents_and_kept,
    law_a_rename_moves_all_that_is_in_a_folder,
    law_a_removed_folder_is_gone,
    law_what_is_not_there_is_said_so,
)


def _write(files: Files, path: Path, *parts: bytes) -> None:
    writer = files.create(path)
    for part in parts:
        writer.write(part)
    writer.sync()
    writer.close()
    files.sync_folder(path.parent)


def _raises(kind: type[BaseException], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False
