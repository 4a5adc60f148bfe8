"""Each rank finds where its tensors lie, at the cost of what it asks for, whoever wrote them."""

import itertools
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.checkpointing.errors import (
    CheckpointingError,
    CheckpointingWarning,
    DamagedCheckpointError,
)
from trainwright.checkpointing.state import Sharded, StateStore, index_file
from trainwright.checkpointing.state.catalog import read_catalog
from trainwright.checkpointing.state.index import DataFile, Located, Piece, digest
from trainwright.checkpointing.state.index_file import (
    decode_index_part,
    find_wrong_tiles,
    read_index_part,
)
from trainwright.checkpointing.state.index_reading import Index
from trainwright.checkpointing.state.manifest import read_manifest
from trainwright.checkpointing.state.ranks import Ranks
from trainwright.checkpointing.state.sealed import seal, unseal
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.checkpointing.testing.forgeries import forgeries
from trainwright.checkpointing.testing.layouts import layouts, random_tensors, shapes
from trainwright.collectives import Box, LocalWorld, ShardSpec, SingleCommunicator

ROOT = Path("/runs/a")


@contextmanager
def _entries_per_file(number):
    """With 1 an index has as many files as ranks, or as pieces; usually one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_file, "ENTRIES_PER_FILE", number)
        yield


def _save(files, layout, tensors, entries):
    def save(comm):
        store = StateStore(
            ROOT, comm, coordinates=layout.coordinates(comm.rank), files=files, block_bytes=16
        )
        store.save(1, layout.take(comm.rank, tensors))

    with _entries_per_file(entries):
        LocalWorld(layout.world_size).run(save)
    (saved,) = read_catalog(files, ROOT).complete
    return saved


@given(data=st.data(), entries=st.sampled_from([1, 4096]))
def test_a_rank_finds_all_pieces_that_hold_its_part_and_no_others(entries, data):
    of_shapes = data.draw(shapes())
    before, after = data.draw(layouts(of_shapes)), data.draw(layouts(of_shapes))
    files = CrashingFiles()
    saved = _save(files, before, random_tensors(of_shapes, torch.int16, 0), entries)

    def ask(comm):
        index = Index(Ranks(comm), files, saved)
        wanted = after.specs[comm.rank]
        everything = index.locate({**dict.fromkeys(of_shapes), "absent": None})
        return index.names, index.locate(wanted), everything

    answers = LocalWorld(after.world_size).run(ask)

    for rank, (_, found, everything) in enumerate(answers):
        assert everything.pop("absent") is None
        for path, spec in after.specs[rank].items():
            of_all = {piece: piece.spec.overlap(spec) for piece in everything[path].pieces}
            overlapping = {piece for piece, runs in of_all.items() if runs}
            assert overlapping <= set(found[path].pieces) <= set(of_all)
            assert found[path].global_shape == of_shapes[path]
            held = sum(run.stop - run.start for runs in of_all.values() for _, run in runs)
            assert held == spec.numel
    spoken = Counter(name for names, _, _ in answers for name in names)
    assert spoken == Counter(of_shapes.keys())


@pytest.mark.parametrize("num_readers", [1, 2, 3, 5])
def test_a_rank_reads_one_index_file_and_looks_at_its_share_of_the_lengths(
    monkeypatch, num_readers
):
    monkeypatch.setattr(index_file, "ENTRIES_PER_FILE", 3)
    files = CrashingFiles()
    names = [f"w{number}" for number in range(6)]

    def save(comm):
        spec = ShardSpec.full("w", (4,)).narrow(2 * comm.rank, 2 * comm.rank + 2)
        tree = {name: Sharded(torch.ones(2), spec) for name in names}
        StateStore(ROOT, comm, files=files).save(1, tree)

    with _entries_per_file(3):
        LocalWorld(2).run(save)
    (saved,) = read_catalog(files, ROOT).complete
    assert len(saved.manifest.index) == 2

    def ask(comm):
        own = _Counting(files)
        index = Index(Ranks(comm), own, saved)
        assert None not in index.locate(dict.fromkeys(names)).values()
        return own.calls

    calls = LocalWorld(num_readers).run(ask)

    assert [rank["open"] for rank in calls] == ([2] if num_readers == 1 else [1] * num_readers)
    assert sum(rank["size"] for rank in calls) == 2
    assert all(rank["size"] <= 1 for rank in calls) or num_readers == 1


@pytest.mark.parametrize("num_readers", [1, 2, 3])
def test_a_short_file_is_seen_whichever_index_its_tensors_are_in(num_readers):
    files = CrashingFiles()
    # The tensor of each rank is in the index file that does not have the rank's own number.
    names = [next(x for x in "abcdef" if digest(x)[0] % 2 != rank) for rank in range(2)]

    def save(comm):
        tree = {names[comm.rank]: Sharded(torch.ones(4), ShardSpec.full("w", (4,)))}
        StateStore(ROOT, comm, files=files).save(1, tree)

    with _entries_per_file(1):
        LocalWorld(2).run(save)
    (saved,) = read_catalog(files, ROOT).complete
    path = saved.folder / "rank-00001.safetensors"
    files.truncate(path, files.size(path) - 1)

    with pytest.raises(DamagedCheckpointError, match=r"rank-00001.safetensors is damaged: length"):
        LocalWorld(num_readers).run(lambda comm: Index(Ranks(comm), files, saved))


class _Counting:
    """Counts the calls of one rank on files that all share."""

    def __init__(self, inner):
        self._inner = inner
        self.calls = Counter()

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(self._inner, name)


@pytest.mark.parametrize("num_old", [0, 3])
def test_a_save_looks_at_no_file_of_old_checkpoints_but_once_at_their_manifests(num_old):
    files = CrashingFiles()
    size = 4

    def save(comm):
        own = _Counting(files)
        store = StateStore(ROOT, comm, files=own, run="r")
        spec = ShardSpec.full("w", (4,)).narrow(comm.rank, comm.rank + 1)
        tree = {"w": Sharded(torch.ones(1), spec)}
        for step in range(num_old + 1):
            own.calls.clear()
            store.save(step, tree)
        return own.calls

    first, *others = LocalWorld(size).run(save)

    # Every rank looks at the files of the one before it: one of tensors, on rank 1 the index too.
    assert [rank["size"] for rank in (first, *others)] == [1, 2, 1, 1]
    assert first["open"] == 1  # the manifest of the save before; after the first save its own
    assert all(rank["open"] == rank["names"] == 0 for rank in others)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_is_one_memory_is_written_once_and_found_under_every_name(num_ranks):
    files = CrashingFiles()

    def save(comm):
        spec = ShardSpec.full("w", (6,)).narrow(6 * comm.rank // 3, 6 * (comm.rank + 1) // 3)
        part = Sharded(torch.arange(6.0)[spec.start : spec.stop], spec)
        # On the last rank the two are equal and not one: each is written there.
        other = part if comm.rank < 2 else Sharded(part.tensor.clone(), spec)
        whole = torch.ones(5)
        tree = {"head": part, "embedding": other, "x": whole, "y": whole, "z": whole.clone()}
        StateStore(ROOT, comm, files=files).save(1, tree)

    def load(comm):
        spec = ShardSpec.full("w", (6,)).narrow(6 * comm.rank // num_ranks, 6)
        names = ("head", "embedding")
        tree = {name: Sharded(torch.zeros(spec.numel), spec) for name in names}
        tree |= {name: torch.zeros(5) for name in "xyz"}
        StateStore(ROOT, comm, files=files).load(tree)
        assert all(
            torch.equal(tree[name].tensor, torch.arange(6.0)[spec.start :]) for name in names
        )
        assert all(torch.equal(tree[name], torch.ones(5)) for name in "xyz")

    LocalWorld(3).run(save)
    LocalWorld(num_ranks).run(load)

    (saved,) = read_catalog(files, ROOT).complete
    found = Index(Ranks(SingleCommunicator()), files, saved).locate(dict.fromkeys("xyz"))
    assert found["x"].pieces[0].offset == found["y"].pieces[0].offset != found["z"].pieces[0].offset


def _some_piece(draw, shape, file):
    corners = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    box = Box([low for low, _ in corners], [high for _, high in corners])
    start, stop = sorted(draw(st.tuples(*[st.integers(0, box.numel)] * 2)))
    spec = ShardSpec("w", shape, [box], start, stop)
    return Piece(DataFile(file, 10**6, 16), spec, 0, 0)


@settings(max_examples=60)
@given(data=st.data())
def test_pieces_are_refused_unless_they_hold_every_element_once(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3)))
    whole = ShardSpec.full("w", shape)
    if data.draw(st.booleans()):  # mostly right: a cut, of which a piece may be lost or doubled
        ends = sorted([0, whole.numel, *data.draw(st.lists(st.integers(0, whole.numel)))])
        specs = [whole.narrow(*pair) for pair in itertools.pairwise(ends)]
        specs = data.draw(st.permutations(specs))[data.draw(st.integers(0, 1)) :]
        pieces = [Piece(DataFile(k, 10**6, 16), spec, 0, 0) for k, spec in enumerate(specs)]
    else:
        pieces = [
            _some_piece(data.draw, shape, file) for file in range(data.draw(st.integers(0, 4)))
        ]

    problems = find_wrong_tiles({"w": Located(torch.float32, shape, tuple(pieces))})

    counts = torch.zeros(shape)
    for piece in pieces:
        for _, box in piece.spec.parts():
            counts[box.slices] += 1
    assert (problems == []) == bool((counts == 1).all())


def _two_index_files():
    """A checkpoint of two ranks and two index files."""
    files = CrashingFiles()

    def save(comm):
        rows = ShardSpec.full("w", (4, 2)).narrow(4 * comm.rank, 4 * comm.rank + 4)
        boxes = [Box((low + comm.rank,), (low + comm.rank + 1,)) for low in (0, 2)]
        tree = {
            "f": Sharded(torch.ones(2), ShardSpec.of_boxes("f", (4,), boxes)),
            "g": torch.ones(()),
            "w": Sharded(torch.ones(4, dtype=torch.complex128), rows),
        }
        StateStore(ROOT, comm, files=files, block_bytes=16).save(1, tree)

    with _entries_per_file(1):
        LocalWorld(2).run(save)
    (saved,) = read_catalog(files, ROOT).complete
    return files, saved


SOUND = _two_index_files()


def _replace_body(files, path, body):
    """Write a sealed file anew, as one who can compute checksums would."""
    data, crc32 = seal(body)
    files.truncate(path, 0)
    files._file(path).data[:] = data
    return [len(data), crc32]


@settings(max_examples=40)
@given(data=st.data())
def test_a_forged_index_places_tensors_within_its_files_or_raises_the_packages_error(data):
    files, saved = SOUND
    path = saved.folder / "index-00000.json"
    body, _ = unseal(bytes(files._file(path).data), path)
    try:
        part = decode_index_part(data.draw(forgeries(body)), path, 0, saved.manifest)
    except DamagedCheckpointError:
        return
    for path, located in part.tensors.items():
        assert digest(path)[0] % 2 == 0
        for piece in located.pieces:
            num_bytes = piece.spec.numel * located.dtype.itemsize
            assert 0 <= piece.file.number < 2
            assert 0 <= piece.offset <= piece.offset + num_bytes <= piece.file.size
            assert piece.sums + 4 * -(-num_bytes // piece.file.block_bytes) <= piece.file.size


@settings(max_examples=15)
@given(data=st.data(), num_ranks=st.integers(1, 2))
def test_a_load_by_a_forged_index_raises_the_packages_error_and_no_other(num_ranks, data):
    files, saved = _two_index_files()
    number = data.draw(st.integers(0, 1))
    path = saved.folder / f"index-0000{number}.json"
    body, _ = unseal(bytes(files._file(path).data), path)
    record = _replace_body(files, path, data.draw(forgeries(body)))
    manifest = saved.folder / "manifest.json"
    body, _ = unseal(bytes(files._file(manifest).data), manifest)
    body["index"][number] = record
    _replace_body(files, manifest, body)

    def load(comm):
        target = {
            "f": torch.zeros(4),
            "g": torch.zeros(()),
            "w": torch.zeros(4, 2, dtype=torch.complex128),
        }
        StateStore(ROOT, comm, files=files).load(target)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointingWarning)
        try:
            LocalWorld(num_ranks).run(load)
        except CheckpointingError:
            return


def test_an_index_file_of_another_save_is_not_taken():
    files, saved = _two_index_files()
    path = saved.folder / "index-00000.json"
    body, _ = unseal(bytes(files._file(path).data), path)
    body["files"][0][4] ^= 1  # as long as before, and sound in itself
    _replace_body(files, path, body)
    with pytest.raises(
        DamagedCheckpointError, match=r"index-00000.json is damaged: (expected|len)"
    ):
        read_index_part(files, saved.folder, saved.manifest, 0)


def test_an_index_with_countless_boxes_or_numbers_is_refused_before_they_are_compared():
    files, saved = _two_index_files()
    path = saved.folder / "index-00000.json"
    body, _ = unseal(bytes(files._file(path).data), path)
    piece = body["tensors"][0][3][0]
    for wrong, why in (([[0, 0]] * 20_000, "20000 boxes"), ([[2**70, 2**70]], "no counts")):
        piece[5] = wrong
        with pytest.raises(DamagedCheckpointError, match=f"index-00000.json is damaged: .*{why}"):
            decode_index_part(body, path, 0, saved.manifest)


def test_a_manifest_that_claims_countless_files_costs_nothing():
    files, saved = _two_index_files()
    path = saved.folder / "manifest.json"
    body, _ = unseal(bytes(files._file(path).data), path)
    body["num_files"] = 2**62
    _replace_body(files, path, body)
    with pytest.raises(DamagedCheckpointError, match="2 index files for 4611686018427387904 ranks"):
        read_manifest(files, saved.folder)
