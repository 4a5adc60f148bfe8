"""Every `Files` obeys the laws, and the file system of the tests loses what was not synced."""

import errno
import mmap
import os
from pathlib import Path

import pytest

from trainwright.checkpointing.state import LocalFiles
from trainwright.checkpointing.state import files as local_files
from trainwright.checkpointing.testing.file_laws import FILES_LAWS
from trainwright.checkpointing.testing.files import CrashingFiles, SimulatedCrash


@pytest.mark.parametrize("law", FILES_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("make", [LocalFiles, CrashingFiles])
def test_every_file_system_obeys_every_law(law, make, tmp_path):
    files = make()
    files.make_folder(tmp_path)
    law(files, tmp_path)


def test_a_local_write_is_complete_where_the_system_writes_a_part(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    writer = LocalFiles().create(tmp_path / "a")
    writer.write(b"0123456789")
    writer.close()
    assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_a_local_writer_lets_the_disk_begin_with_all_that_is_written(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(local_files, "_HAND_OVER_BYTES", 10)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *about: begun.append(about[:2]))
    writer = LocalFiles().create(tmp_path / "a")
    for count in (4, 4, 4, 30, 3):
        writer.write(b"x" * count)
    writer.close()
    assert begun == [(0, 12), (12, 30)]


def test_a_file_that_cannot_be_mapped_is_read(tmp_path, monkeypatch):
    def refuse(*about, **options):
        raise OSError(errno.ENODEV, "no such device")

    (tmp_path / "a").write_bytes(b"0123456789")
    monkeypatch.setattr(mmap, "mmap", refuse)
    reader = LocalFiles().open(tmp_path / "a")
    assert bytes(reader.view(3, 4)) == b"3456"
    assert bytes(reader.view(8, 4)) == b"89"
    reader.close()


def test_a_file_that_became_shorter_ends_early_and_not_the_process(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 5 * mmap.PAGESIZE)
    reader = LocalFiles().open(tmp_path / "a")
    os.truncate(tmp_path / "a", mmap.PAGESIZE)
    assert len(reader.view(3 * mmap.PAGESIZE, 9)) == 0
    assert bytes(reader.view(0, 9)) == b"x" * 9
    reader.close()


def test_after_a_crash_synced_data_is_whole_and_other_data_is_old_new_or_torn():
    files = CrashingFiles()
    files.make_folder(Path("/d"))
    writer = files.create(Path("/d/a"))
    writer.write(b"s" * 100)
    writer.sync()
    files.sync_folder(Path("/d"))
    writer.write(b"u" * 100)
    files.create(Path("/d/b")).write(b"lost?")

    seen = set()
    for seed in range(60):
        after = files.after_crash(seed)
        data = bytes(after._file(Path("/d/a")).data)
        assert data.startswith(b"s" * 100)
        assert len(data) <= 200
        seen.add((data, "b" in after.names(Path("/d"))))

    assert (b"s" * 100, False) in seen
    assert (b"s" * 100 + b"u" * 100, True) in seen
    assert any(data not in (b"s" * 100, b"s" * 100 + b"u" * 100) for data, _ in seen)


def test_nothing_succeeds_after_a_crash():
    files = CrashingFiles(crash_after=1)
    files.make_folder(Path("/d"))
    for _ in range(2):
        with pytest.raises(SimulatedCrash):
            files.make_folder(Path("/e"))
    assert files.after_crash(0).names(Path("/")) == ["d"]
