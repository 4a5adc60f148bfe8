"""Generators of ranks: each goes on where it was, or none does and a warning says so."""

import pytest
import torch

from trainwright.checkpointing import (
    CheckpointingWarning,
    RankGenerators,
    StateStore,
    TreeError,
)
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.collectives import LocalWorld

NAMES = ("dropout", "router")


def _generators(comm, layout, first_seed):
    made = {
        name: torch.Generator().manual_seed(first_seed + 10 * comm.rank + number)
        for number, name in enumerate(NAMES)
    }
    return RankGenerators(made, comm, layout)


def _draw(own):
    return [torch.rand(3, generator=own.generators[name]).tolist() for name in NAMES]


def _save(comm, files, layout):
    own = _generators(comm, layout, first_seed=1)
    for generator in own.generators.values():
        torch.rand(comm.rank + 1, generator=generator)
    StateStore("/run", comm, files=files).save(5, {"w": torch.ones(2), "own": own.tree()})
    return _draw(own)


def _resume(comm, files, layout):
    own = _generators(comm, layout, first_seed=1000)
    target = {"w": torch.zeros(2), "own": own.target()}
    report = StateStore("/run", comm, files=files).load_partial(target)
    assert torch.equal(target["w"], torch.ones(2))
    own.restore(report.tree["own"], report.step)
    return _draw(own), report.missing


def test_in_the_layout_that_saved_each_rank_draws_what_it_would_have_drawn():
    files = CrashingFiles()
    never_stopped = LocalWorld(4).run(lambda comm: _save(comm, files, "tp=2,pp=2"))

    resumed = LocalWorld(4).run(lambda comm: _resume(comm, files, "tp=2,pp=2"))

    assert [drawn for drawn, _ in resumed] == never_stopped
    assert all(missing == () for _, missing in resumed)
    assert len({str(drawn) for both in never_stopped for drawn in both}) == 8


@pytest.mark.parametrize(("ranks", "layout"), [(4, "dp=4"), (2, "tp=2"), (5, "dp=5")])
def test_in_another_layout_all_are_seeded_anew_and_differ_with_a_warning(ranks, layout):
    files = CrashingFiles()
    never_stopped = LocalWorld(4).run(lambda comm: _save(comm, files, "tp=2,pp=2"))

    with pytest.warns(CheckpointingWarning, match=f"dropout, router for layout {layout}"):
        first = LocalWorld(ranks).run(lambda comm: _resume(comm, files, layout))
    with pytest.warns(CheckpointingWarning):
        second = LocalWorld(ranks).run(lambda comm: _resume(comm, files, layout))

    assert first == second
    drawn = [str(numbers) for own, _ in first for numbers in own]
    drawn += [str(numbers) for own in never_stopped for numbers in own]
    assert len(set(drawn)) == 2 * ranks + 8


def test_a_generator_needs_a_name_that_a_tree_can_hold():
    for names, layout in (({"a/b": torch.Generator()}, "dp=1"), ({}, "a/b"), ({}, "")):
        with pytest.raises(TreeError, match="names without '/'"):
            RankGenerators(names, LocalWorld(1).run(lambda comm: comm)[0], layout)
