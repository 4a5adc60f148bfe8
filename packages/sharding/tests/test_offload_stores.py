"""Places for states: what is kept in them, counted, and left behind."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.sharding.offload import (
    FileStore,
    HostMemory,
    Lane,
    Ledger,
    OffloadError,
    Pace,
    Store,
    offload_to_host,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8]


@pytest.fixture(params=["host", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return HostMemory() if request.param == "host" else FileStore(tmp_path)


def numbers(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_written_to_a_slot_is_read_from_it(store: Store, dtype: torch.dtype) -> None:
    sizes = [1, 17, 5000]
    store.reserve([100_000])

    slots = [store.allocate(size, dtype, CPU) for size in sizes]
    for seed, (slot, size) in enumerate(zip(slots, sizes, strict=True)):
        slot.tensor.copy_(numbers(size, dtype, seed))

    for seed, (slot, size) in enumerate(zip(slots, sizes, strict=True)):
        assert slot.tensor.dtype == dtype
        assert torch.equal(slot.tensor, numbers(size, dtype, seed))


@given(sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=4), dtype=st.sampled_from(DTYPES))
def test_what_is_read_and_written_in_pieces_is_what_the_mapping_shows(
    sizes: list[int], dtype: torch.dtype
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(folder)
        slots = [store.allocate(size, dtype, CPU) for size in sizes]

        works = [slot.write(numbers(size, dtype)) for slot, size in zip(slots, sizes, strict=True)]
        for work in works:
            work.wait()
        shown = [slot.tensor.clone() for slot in slots]
        for slot in slots:
            slot.tensor.add_(1)
        read = [torch.empty(size, dtype=dtype) for size in sizes]
        for work in [slot.read(into) for slot, into in zip(slots, read, strict=True)]:
            work.wait()

        for size, was, now in zip(sizes, shown, read, strict=True):
            assert torch.equal(was, numbers(size, dtype))
            assert torch.equal(now, numbers(size, dtype) + 1)


def test_memory_that_was_read_into_can_still_be_resized(tmp_path: Path) -> None:
    slot = FileStore(tmp_path).allocate(8, torch.float32, CPU)
    target = torch.empty(8)

    slot.read(target).wait()
    target.untyped_storage().resize_(0)

    assert target.untyped_storage().nbytes() == 0


def test_host_memory_is_counted_until_nobody_has_it() -> None:
    store = HostMemory()

    first = store.allocate(10, torch.float32, CPU)
    second = store.allocate(6, torch.float64, CPU)
    assert store.ledger.held_bytes == 40 + 48
    del first
    gc.collect()

    assert (store.ledger.held_bytes, store.ledger.peak_bytes) == (48, 88)
    assert second.tensor.numel() == 6


def test_host_memory_beyond_its_limit_is_refused_before_it_is_taken() -> None:
    store = HostMemory(limit_bytes=100)
    kept = store.allocate(20, torch.float32, CPU)

    with pytest.raises(OffloadError, match=r"host memory would hold 104 bytes.*limit is 100"):
        store.allocate(6, torch.float32, CPU)

    assert store.ledger.held_bytes == 80
    assert kept.tensor.numel() == 20


def test_a_limit_is_met_where_memory_is_reserved() -> None:
    store = HostMemory(limit_bytes=100)
    store.reserve([60, 40])

    with pytest.raises(OffloadError, match=r"host memory would hold 101 bytes.*limit is 100"):
        store.reserve([60, 41])

    assert (store.ledger.held_bytes, store.ledger.peak_bytes) == (0, 0)


def test_memory_that_the_system_does_not_give_is_not_counted() -> None:
    store = HostMemory()

    with pytest.raises(OffloadError, match="has no 4,611,686,018,427,387,904 bytes"):
        store.allocate(2**60, torch.float32, CPU)

    assert store.ledger.held_bytes == 0


def test_a_file_has_no_name_in_its_folder(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.allocate(100_000, torch.float32, CPU).tensor.fill_(1.0)

    assert list(tmp_path.iterdir()) == []
    assert store.file_bytes >= 400_000


def test_a_file_system_without_files_that_have_no_name_is_left_empty_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.open

    def without(path: object, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return usual(path, flags, *rest, **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", without)
    slot = FileStore(tmp_path).allocate(5, torch.float32, CPU)
    slot.tensor.fill_(3.0)

    assert list(tmp_path.iterdir()) == []
    assert slot.tensor.tolist() == [3.0] * 5


def test_the_file_is_closed_when_nobody_has_it(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    store = FileStore(tmp_path)
    slot = store.allocate(5, torch.float32, CPU)
    slot.write(torch.zeros(5)).wait()

    del store, slot
    gc.collect()

    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_full_disk_is_an_error_that_leaves_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    slot = store.allocate(5, torch.float32, CPU)
    slot.tensor.fill_(2.0)
    had = store.file_bytes

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match=r"no space for 8,192 bytes.*No space left"):
        store.allocate(2000, torch.float32, CPU)

    assert store.file_bytes == had
    assert slot.tensor.tolist() == [2.0] * 5


def test_slots_that_were_reserved_together_take_one_descriptor(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    before = len(os.listdir("/proc/self/fd"))

    store.reserve([4 * 5000] * 50)
    slots = [store.allocate(5000, torch.float32, CPU) for _ in range(51)]
    for number, slot in enumerate(slots):
        slot.tensor.fill_(number)

    assert len(os.listdir("/proc/self/fd")) - before <= 2  # the last one was not reserved
    assert [set(slot.tensor.tolist()) for slot in slots] == [{float(n)} for n in range(51)]
    assert all(store.holds(slot.tensor) for slot in slots)


def test_a_file_that_cannot_be_mapped_is_an_error_of_reserving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(OffloadError, match=r"cannot be mapped.*Too many open files"):
        store.reserve([100])

    monkeypatch.undo()
    store.allocate(25, torch.float32, CPU).tensor.fill_(1.0)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_file_that_fails_is_an_error_of_the_one_who_waits(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = FileStore(tmp_path).allocate(5, torch.float32, CPU)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    work = slot.read(torch.empty(5)) if call == "preadv" else slot.write(torch.empty(5))

    with pytest.raises(OffloadError, match="Input/output error"):
        work.wait()


def test_short_reads_and_writes_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = FileStore(tmp_path).allocate(1000, torch.int32, CPU)
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:700]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [views[0][:300]], at))
    found = torch.empty(1000, dtype=torch.int32)

    slot.write(torch.arange(1000, dtype=torch.int32)).wait()
    slot.read(found).wait()

    assert torch.equal(found, torch.arange(1000, dtype=torch.int32))


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_folder_that_is_none_is_refused(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(OffloadError, match="it is no folder"):
        FileStore(tmp_path / folder)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_lane_makes_moves_in_order_and_lets_few_wait(depth: int) -> None:
    lane = Lane("moves", depth=depth)
    handed_over: list[int] = []
    made: list[int] = []
    waiting: list[int] = []

    def move(number: int) -> None:
        waiting.append(len(handed_over) - number)
        made.append(number)

    works = []
    for number in range(20):
        works.append(lane.submit(partial(move, number), 1))
        handed_over.append(number)
    for work in works:
        work.wait()

    assert made == list(range(20))
    assert max(waiting) <= depth  # itself among them
    assert lane.moved_bytes == 20


def test_a_move_that_fails_does_not_stop_the_lane() -> None:
    lane = Lane("moves", depth=1)
    failing = lane.submit(lambda: 1 // 0, 1)  # type: ignore[arg-type, return-value]
    following = lane.submit(lambda: None, 1)

    with pytest.raises(ZeroDivisionError):
        failing.wait()
    following.wait()

    assert following.is_done()


@pytest.mark.parametrize("rate", [None, 1e9])
def test_a_lane_converts_adds_and_says_when_memory_is_free(rate: float | None) -> None:
    lane, freed = Lane("moves", Pace(rate)), []
    kept = torch.ones(3)
    sums = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)

    lane.copy(sums, kept, to_host=True, add=True, after=lambda: freed.append(1)).wait()
    lane.copy(kept, sums, to_host=False).wait()

    assert kept.tolist() == sums.tolist() == [2.0, 3.0, 4.0]
    assert freed == [1]
    assert lane.moved_bytes == 12


def test_a_ledger_counts_what_is_held_and_the_most_there_was() -> None:
    ledger = Ledger("the device", limit_bytes=10)

    ledger.take(7)
    ledger.give(4)
    ledger.take(5)
    with pytest.raises(OffloadError, match="the device would hold 11 bytes"):
        ledger.take(3)
    ledger.give(2)

    assert (ledger.held_bytes, ledger.peak_bytes) == (6, 8)
    ledger.reset_peak()
    assert ledger.peak_bytes == 6


def test_rates_and_limits_out_of_range_are_refused() -> None:
    with pytest.raises(OffloadError, match="rate must be positive, got 0"):
        offload_to_host(link_bytes_s=0.0)
    with pytest.raises(OffloadError, match="at least 0 bytes, got -1"):
        offload_to_host(device_limit_bytes=-1)
