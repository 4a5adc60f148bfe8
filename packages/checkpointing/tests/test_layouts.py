"""Any layout loads what any other saved, and nothing is written or read that need not be."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.checkpointing.errors import MismatchError, TreeError
from trainwright.checkpointing.state import Sharded, StateStore
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.checkpointing.testing.layouts import (
    DTYPES,
    Layout,
    layouts,
    random_tensors,
    shapes,
)
from trainwright.collectives import Box, LocalWorld, ShardSpec

ROOT = Path("/runs/a")


def _bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _store(files, comm=None, layout=None, **options):
    coordinates = layout.coordinates(comm.rank) if layout else {}
    return StateStore(ROOT, comm, coordinates=coordinates, files=files, block_bytes=16, **options)


def _save_cut(files, layout, tensors, plain):
    def save(comm):
        tree = {"model": layout.take(comm.rank, tensors), "plain": plain}
        _store(files, comm, layout).save(1, tree)

    LocalWorld(layout.world_size).run(save)


def _load_cut(files, layout, tensors, plain):
    def load(comm):
        target = layout.empty(comm.rank, tensors)
        wanted = {"model": target, "plain": dict.fromkeys(plain)}
        return _store(files, comm, layout).load(wanted)

    return LocalWorld(layout.world_size).run(load)


@settings(max_examples=25)
@given(data=st.data())
def test_any_layout_loads_bitwise_what_any_other_saved(data):
    of_shapes = data.draw(shapes())
    dtypes = {path: data.draw(st.sampled_from(DTYPES)) for path in of_shapes}
    before = data.draw(layouts(of_shapes))
    after = data.draw(layouts(of_shapes))
    tensors = random_tensors(of_shapes, dtypes, data.draw(st.integers(0, 2**16)))
    plain = {"step": 3, "position": 2**70, "scale": 0.1}
    files = CrashingFiles()

    _save_cut(files, before, tensors, plain)
    loaded = _load_cut(files, after, tensors, plain)

    for rank, tree in enumerate(loaded):
        assert tree["plain"] == plain
        for path, leaf in tree["model"].items():
            expected = after.specs[rank][path].extract(tensors[path])
            assert torch.equal(_bits(leaf.tensor), _bits(expected))


@given(data=st.data())
def test_every_element_is_written_once_whatever_the_replicas(data):
    of_shapes = data.draw(shapes())
    layout = data.draw(layouts(of_shapes))
    tensors = random_tensors(of_shapes, torch.float32, 0)
    files = CrashingFiles()

    _save_cut(files, layout, tensors, {})

    written = 0
    for path in files.paths():
        if path.suffix == ".safetensors":
            reader = files.open(path)
            head = bytearray(8)
            reader.read_into(0, memoryview(head))
            written += reader.size - 8 - int.from_bytes(head, "little")
    elements = sum(tensor.numel() for tensor in tensors.values())
    parts = sum(len(specs) for specs in layout.specs)
    most_blocks = -(-elements * 4 // 16) + parts
    assert elements * 4 <= written <= elements * 4 + 4 * most_blocks


@given(data=st.data())
def test_one_process_loads_the_whole_of_any_layout(data):
    of_shapes = data.draw(shapes())
    layout = data.draw(layouts(of_shapes))
    tensors = random_tensors(of_shapes, torch.bfloat16, 1)
    files = CrashingFiles()
    _save_cut(files, layout, tensors, {})

    target = {path: torch.zeros_like(tensor) for path, tensor in tensors.items()}
    _store(files).load({"model": target, "plain": {}})

    for path, tensor in tensors.items():
        assert torch.equal(_bits(target[path]), _bits(tensor))


class CountingFiles(CrashingFiles):
    """Counts the bytes read from tensor files."""

    def __init__(self):
        super().__init__()
        self.num_read = 0
        self.num_opened = 0

    def open(self, path):
        reader = super().open(path)
        if path.suffix == ".safetensors":
            self.num_opened += 1
            inner = reader.view

            def view(offset, count):
                self.num_read += count
                return inner(offset, count)

            reader.view = view
        return reader


@pytest.mark.parametrize("part", range(4))
def test_a_load_reads_only_the_blocks_that_hold_its_part(part):
    files = CountingFiles()
    whole = torch.arange(4096, dtype=torch.float32).view(64, 64)
    StateStore(ROOT, files=files, block_bytes=256).save(0, {"w": whole})
    spec = ShardSpec.of_boxes("w", (64, 64), [Box((16 * part, 0), (16 * part + 16, 64))])
    target = torch.zeros(16, 64)

    files.num_read = 0
    StateStore(ROOT, files=files).load({"w": Sharded(target, spec)})

    assert torch.equal(target, whole[16 * part : 16 * part + 16])
    assert files.num_read == target.nbytes + 4 * target.nbytes // 256


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_rank_on_its_old_place_opens_its_own_file_only(num_ranks):
    files = CountingFiles()
    whole = torch.arange(12.0)

    def part(comm):
        ends = [12 * rank // comm.size for rank in (comm.rank, comm.rank + 1)]
        spec = ShardSpec.full("w", (12,)).narrow(*ends)
        return {"w": Sharded(spec.extract(whole), spec)}

    LocalWorld(num_ranks).run(lambda comm: _store(files, comm).save(1, part(comm)))
    LocalWorld(num_ranks).run(lambda comm: _store(files, comm).load(part(comm)))

    assert files.num_opened == num_ranks


def test_pieces_that_cross_and_leave_an_equal_hole_are_an_error_at_the_save():
    files = CrashingFiles()

    def save(comm):
        spec = ShardSpec.full("w", (8,)).narrow(2 * comm.rank, 2 * comm.rank + 4)
        _store(files, comm).save(1, {"w": Sharded(torch.ones(4), spec)})

    with pytest.raises(TreeError, match=r"w \(8,\) float32: elements \(2,\) to \(4,\)"):
        LocalWorld(2).run(save)
    assert list(files.paths()) == []


def test_experts_stacked_in_one_tensor_and_optimizer_states_move_between_all_parallelisms():
    """From tp=2 pp=2 ep=2 to dp=4 ZeRO and back: a weight, fused q k v, experts, a stage's own."""
    tensors = random_tensors(
        {"qkv": (9, 4), "experts": (5, 3, 2), "moment": (7, 3), "last": (3,), "scale": ()},
        {
            "qkv": torch.bfloat16,
            "experts": torch.float8_e4m3fn,
            "moment": torch.complex128,
            "last": torch.bool,
            "scale": torch.int64,
        },
        5,
    )
    full = {path: tuple(tensor.shape) for path, tensor in tensors.items()}

    def rows(path, *spans, replicated=()):
        rest = full[path][1:]
        boxes = [Box((low, *(0 for _ in rest)), (high, *rest)) for low, high in spans]
        return ShardSpec.of_boxes(path, full[path], boxes, replicated)

    def cut_3d(rank):
        pp, ep, tp = rank // 4, rank // 2 % 2, rank % 2
        if pp:
            return {
                "experts": rows("experts", (0, 2) if ep == 0 else (2, 5), replicated=("tp",)),
                "last": rows("last", (0, 3), replicated=("ep", "tp")),
                "scale": ShardSpec.full("scale", (), ("ep", "tp")),
            }
        spans = [(0, 3), (6, 7), (8, 8)] if tp == 0 else [(3, 6), (7, 8), (8, 9)]
        return {
            "qkv": rows("qkv", *spans, replicated=("ep",)),
            "moment": rows("moment", (0, 4) if tp == 0 else (4, 7), replicated=("ep",)),
        }

    def cut_zero(rank):
        held = {}
        for path, shape in full.items():
            count = torch.Size(shape).numel()
            ends = [(count * at + 1) // 4 for at in (rank, rank + 1)]
            held[path] = ShardSpec.full(path, shape).narrow(*ends)
        return held

    sizes = {"pp": 2, "dp": 1, "ep": 2, "tp": 2}
    before = Layout(sizes, tuple(map(cut_3d, range(8))))
    after = Layout({"pp": 1, "dp": 4, "ep": 1, "tp": 1}, tuple(map(cut_zero, range(4))))
    for one, other in ((before, after), (after, before)):
        files = CrashingFiles()
        _save_cut(files, one, tensors, {})
        for rank, tree in enumerate(_load_cut(files, other, tensors, {})):
            assert tree["model"].keys() == other.specs[rank].keys()
            for path, leaf in tree["model"].items():
                expected = other.specs[rank][path].extract(tensors[path])
                assert torch.equal(_bits(leaf.tensor), _bits(expected))


def test_a_gated_weight_keeps_its_row_order_on_any_number_of_ranks():
    """Rows 0..7 are gate, 8..15 up; four ranks hold two of each."""
    rows = torch.arange(16.0).view(16, 1)
    files = CrashingFiles()

    def cut(rank, size):
        half = 8 // size
        boxes = [Box((low + rank * half, 0), (low + (rank + 1) * half, 1)) for low in (0, 8)]
        return ShardSpec.of_boxes("w", (16, 1), boxes)

    def save(comm):
        spec = cut(comm.rank, comm.size)
        _store(files, comm).save(1, {"w": Sharded(spec.extract(rows), spec)})

    def load(comm):
        spec = cut(comm.rank, comm.size)
        tensor = torch.zeros(spec.local_shape)
        _store(files, comm).load({"w": Sharded(tensor, spec)})
        whole = torch.zeros(16, 1)
        spec.insert(tensor, whole)
        return whole

    LocalWorld(4).run(save)
    for size in (1, 2, 8):
        assert torch.equal(sum(LocalWorld(size).run(load)), rows)


@pytest.mark.parametrize("before", [2, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_padded_buckets_are_read_at_the_offsets_of_their_elements(before, after):
    """Two flat buckets of 5 and 3 elements, padded where the ranks cut them; padding is no data."""
    buckets = {"m/0": torch.arange(1.0, 6.0), "m/1": torch.arange(11.0, 14.0)}
    files = CrashingFiles()

    def pieces(comm):
        tree = {}
        for name, bucket in buckets.items():
            chunk = -(-len(bucket) // comm.size)
            start = min(comm.rank * chunk, len(bucket))
            stop = min(start + chunk, len(bucket))
            spec = ShardSpec.full(name, bucket.shape).narrow(start, stop)
            tree[name.replace("/", "_")] = Sharded(bucket[start:stop].clone(), spec)
        return tree

    def load(comm):
        tree = pieces(comm)
        for leaf in tree.values():
            leaf.tensor.zero_()
        _store(files, comm).load(tree)
        return [leaf.tensor for leaf in tree.values()]

    LocalWorld(before).run(lambda comm: _store(files, comm).save(1, pieces(comm)))
    loaded = LocalWorld(after).run(load)

    for number, bucket in enumerate(buckets.values()):
        assert torch.equal(torch.cat([rank[number] for rank in loaded]), bucket)


def test_each_rank_gets_its_own_random_stream_back():
    files = CrashingFiles()
    sizes = {"pp": 2, "tp": 2}

    def row(comm, state):
        spec = ShardSpec.of_boxes(
            "rng", (comm.size, len(state)), [Box((comm.rank, 0), (comm.rank + 1, len(state)))]
        )
        return Sharded(state.view(1, -1), spec)

    def save(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        torch.rand(comm.rank + 1, generator=generator)
        store = _store(files, comm)
        store.save(1, {"rng": row(comm, generator.get_state())})
        return torch.rand(3, generator=generator)

    def resume(comm):
        generator = torch.Generator()
        state = generator.get_state()
        _store(files, comm).load({"rng": row(comm, state)})
        generator.set_state(state)
        return torch.rand(3, generator=generator)

    world = LocalWorld(sizes["pp"] * sizes["tp"])
    expected = world.run(save)
    found = world.run(resume)

    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert len({tuple(numbers.tolist()) for numbers in found}) == 4


def test_what_differs_between_ranks_is_not_saved_as_if_it_were_the_same():
    files = CrashingFiles()

    def save(comm):
        tree = {"rng": torch.full((4,), comm.rank), "loss": 0.5 * comm.rank, "step": 3}
        _store(files, comm).save(1, tree)

    with pytest.raises(TreeError, match=r"rank 1") as caught:
        LocalWorld(3).run(save)
    assert "rng: not the same as on rank 0" in str(caught.value)
    assert "loss: not the same as on rank 0" in str(caught.value)
    assert "step:" not in str(caught.value)
    assert list(files.paths()) == []


def test_a_forgotten_replicated_axis_is_an_error_at_the_save():
    def save(comm):
        _store(CrashingFiles(), comm).save(
            1, {"w": Sharded(torch.ones(4), ShardSpec.full("w", (4,)))}
        )

    with pytest.raises(TreeError, match=r"would be written 2 times.*replicated"):
        LocalWorld(2).run(save)


def test_elements_that_no_rank_holds_are_an_error_at_the_save():
    def save(comm):
        spec = ShardSpec.full("w", (5,)).narrow(2 * comm.rank, 2 * comm.rank + 2)
        _store(CrashingFiles(), comm).save(1, {"w": Sharded(torch.ones(2), spec)})

    with pytest.raises(TreeError, match="only 4 of its 5 elements"):
        LocalWorld(2).run(save)


def test_ranks_that_disagree_about_a_shape_are_an_error_at_the_save():
    def save(comm):
        rows = 4 + 2 * comm.rank
        spec = ShardSpec.full("w", (rows,)).narrow(2 * comm.rank, 2 * comm.rank + 2)
        _store(CrashingFiles(), comm).save(1, {"w": Sharded(torch.ones(2), spec)})

    with pytest.raises(TreeError, match="another rank says another shape or dtype"):
        LocalWorld(2).run(save)


def test_ranks_that_save_different_steps_are_an_error():
    with pytest.raises(TreeError, match=r"step 1, .* here, step 0, .* on rank 0"):
        LocalWorld(2).run(lambda comm: _store(CrashingFiles(), comm).save(comm.rank, {"a": 1}))


def test_a_replicated_axis_without_a_coordinate_is_an_error_on_every_rank():
    def save(comm):
        spec = ShardSpec.full("w", (4,), replicated=("dp",))
        tree = {"w": Sharded(torch.ones(4), spec)} if comm.rank == 1 else {}
        _store(CrashingFiles(), comm).save(1, tree)

    with pytest.raises(TreeError, match="replicated on axis 'dp'"):
        LocalWorld(2).run(save)


def test_a_tensor_of_one_stage_that_nobody_wants_any_more_is_reported_by_name():
    files = CrashingFiles()
    spec = ShardSpec.full("x", (2,))

    def save(comm):
        _store(files, comm).save(1, {f"stage{comm.rank}": Sharded(torch.ones(2), spec)})

    def load(comm):
        wanted = {"stage0": Sharded(torch.ones(2), spec)} if comm.rank == 0 else {}
        _store(files, comm).load(wanted)

    LocalWorld(2).run(save)
    with pytest.raises(MismatchError, match="stage1: expected nothing of that path, found"):
        LocalWorld(3).run(load)
