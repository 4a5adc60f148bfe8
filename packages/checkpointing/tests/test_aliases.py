"""Tied weights are stored once, and no name of theirs is lost, whoever ties them."""

from pathlib import Path

import pytest
import torch

from trainwright.checkpointing.errors import MismatchError
from trainwright.checkpointing.state import Sharded, StateStore, open_checkpoint
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.collectives import LocalWorld, ShardSpec

ROOT = Path("/runs/a")
WHOLE = torch.arange(24.0).view(6, 4)


def _tree(names, comm=None, tied=True, value=0.0):
    """The names with one memory or each its own; over ranks, each holds a range."""
    tree = {}
    memory = None
    for name in names:
        spec = ShardSpec.full(name, (6, 4))
        if comm is not None:
            spec = spec.narrow(24 * comm.rank // comm.size, 24 * (comm.rank + 1) // comm.size)
        if memory is None or not tied:
            memory = torch.full((spec.numel,), value)
        tree[name] = Sharded(memory, spec)
    return tree


def _fill(tree):
    for leaf in tree.values():
        leaf.tensor.copy_(leaf.spec.extract(WHOLE).view(-1))
    return tree


def _saved(names, num_ranks, tied):
    files = CrashingFiles()

    def save(comm):
        StateStore(ROOT, comm, files=files, run="r").save(1, _fill(_tree(names, comm, tied)))

    LocalWorld(num_ranks).run(save)
    return files


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_tied_weight_is_stored_once_and_listed_under_each_name(num_ranks):
    files = _saved(["head", "emb", "third"], num_ranks, tied=True)
    data = [path for path in files.paths() if path.suffix == ".safetensors"]
    assert sum(files.size(path) for path in data) < 2 * WHOLE.nbytes + 800 * num_ranks
    checkpoint = open_checkpoint(ROOT, files=files)
    assert [entry.alias_of for entry in checkpoint.tensors.values()] == [None, "emb", "emb"]
    assert all(torch.equal(checkpoint.read(name), WHOLE) for name in checkpoint.tensors)
    StateStore(ROOT, files=files).verify()


@pytest.mark.parametrize("tied_there", [True, False])
@pytest.mark.parametrize(
    ("names", "tied_here"),
    [(["emb", "head"], True), (["emb", "head"], False), (["emb"], True), (["head"], True)],
)
def test_any_name_restores_all_whether_the_target_ties_them_or_not(tied_there, names, tied_here):
    files = _saved(["emb", "head"], 2, tied_there)
    for num_ranks in (1, 3):

        def load(comm):
            tree = _tree(names, comm, tied_here)
            store = StateStore(ROOT, comm, files=files)
            if tied_there or len(names) == 2:
                store.load(tree)
            else:  # without a tie the other name is a tensor that nobody wants
                assert store.load_partial(tree).num_unexpected == 1
            return all(
                torch.equal(leaf.tensor, leaf.spec.extract(WHOLE).view(-1))
                for leaf in tree.values()
            )

        assert all(LocalWorld(num_ranks).run(load))


@pytest.mark.parametrize("name", ["emb", "head"])
def test_one_stored_name_is_enough_for_a_tied_target_and_not_for_an_untied_one(name):
    files = _saved([name], 1, tied=True)
    tied = _tree(["emb", "head"])
    StateStore(ROOT, files=files).load(tied)
    assert torch.equal(tied["emb"].tensor.view(6, 4), WHOLE)

    other = {"emb": "head", "head": "emb"}[name]
    with pytest.raises(MismatchError, match=f"{other}: expected a tensor, found nothing"):
        StateStore(ROOT, files=files).load(_tree(["emb", "head"], tied=False))
    with pytest.raises(MismatchError, match="x: expected a tensor, found nothing") as caught:
        StateStore(ROOT, files=files).load(_tree(["x", "y"]))
    assert "y: expected a tensor, found nothing" in str(caught.value)


def test_two_different_values_are_not_loaded_into_one_memory():
    files = CrashingFiles()
    there = {"emb": torch.ones(3), "head": torch.tensor([1.0, 1.0, -0.0])}
    StateStore(ROOT, files=files).save(1, there)
    weight = torch.zeros(3)
    with pytest.raises(MismatchError, match="head: the target gives it the memory of another path"):
        StateStore(ROOT, files=files).load({"emb": weight, "head": weight})
    report = StateStore(ROOT, files=files).load_partial(
        {"emb": weight, "head": weight}, skip=["head"]
    )
    assert (weight.tolist(), report.skipped) == ([1, 1, 1], ("head",))


def test_views_that_differ_in_place_shape_or_stride_are_stored_each():
    files = CrashingFiles()
    base = torch.arange(16.0).view(4, 4)
    tree = {"a": base, "b": base.T, "c": base.view(16), "d": base[1:], "e": base.view(torch.int32)}
    tree |= {"none": torch.zeros(0), "none too": torch.zeros(0)}
    StateStore(ROOT, files=files).save(1, tree)
    checkpoint = open_checkpoint(ROOT, files=files)
    assert {entry.alias_of for entry in checkpoint.tensors.values()} == {None}
    assert all(torch.equal(checkpoint.read(name), tree[name]) for name in tree)


def test_ranks_may_disagree_about_what_is_tied():
    files = CrashingFiles()

    def save(comm):
        tree = _fill(_tree(["a", "b"], comm, tied=comm.rank != 1))
        StateStore(ROOT, comm, files=files).save(1, tree)

    LocalWorld(3).run(save)
    target = {"a": torch.zeros(6, 4), "b": torch.zeros(6, 4)}
    StateStore(ROOT, files=files).load(target)
    assert torch.equal(target["a"], WHOLE)
    assert torch.equal(target["b"], WHOLE)
