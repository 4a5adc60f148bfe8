"""What does not fit is told on all ranks alike; a partial load says what it left and why."""

from pathlib import Path

import pytest
import torch
from torch import nn

from trainwright.checkpointing.errors import MismatchError, TreeError
from trainwright.checkpointing.state import Sharded, StateStore
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.collectives import LocalWorld, ShardSpec

ROOT = Path("/runs/a")


def _store(files, comm=None):
    return StateStore(ROOT, comm, files=files, block_bytes=16)


def _saved(tree):
    files = CrashingFiles()
    _store(files).save(1, tree)
    return files


def _part(name, comm, length=8, dtype=torch.float32):
    ends = [length * rank // comm.size for rank in (comm.rank, comm.rank + 1)]
    spec = ShardSpec.full(name, (length,)).narrow(*ends)
    return Sharded(torch.zeros(spec.numel, dtype=dtype), spec)


def _errors(work, num_ranks, kind):
    def attempt(comm):
        with pytest.raises(kind) as caught:
            work(comm)
        return str(caught.value)

    return LocalWorld(num_ranks).run(attempt)


def _state_of(model, optimizer, named):
    """An optimizer's state by the names of the parameters, as a new parameter moves no other's."""
    names = {number: name for number, (name, _) in enumerate(named)}
    state = optimizer.state_dict()
    return {
        "model": model.state_dict(),
        "state": {names[number]: entry for number, entry in state["state"].items()},
        "groups": [
            {k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]
        ],
    }


def _steps(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


class FooAdam(torch.optim.Adam):
    """A later version of an optimizer, with an option more."""

    def __init__(self, parameters):
        super().__init__(parameters)
        for group in self.param_groups:
            group["foo"] = 7


def test_an_optimizer_that_gained_an_option_and_a_parameter_goes_on_from_an_old_checkpoint():
    old = nn.Sequential(nn.Linear(3, 2))
    adam = torch.optim.Adam(old.parameters(), lr=0.5)
    _steps(old, adam, 3)
    files = _saved(_state_of(old, adam, list(old.named_parameters())))

    new = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    foo = FooAdam(new.parameters())
    for parameter in new.parameters():  # the state that a fresh optimizer begins with
        zeros = torch.zeros_like(parameter)
        foo.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": zeros,
            "exp_avg_sq": zeros.clone(),
        }
    fresh = new[1].weight.clone()
    report = _store(files).load_partial(_state_of(new, foo, list(new.named_parameters())))

    loaded = report.tree
    assert loaded["groups"][0]["foo"] == 7
    assert (loaded["groups"][0]["lr"], loaded["groups"][0]["betas"]) == (0.5, (0.9, 0.999))
    assert [float(entry["step"]) for entry in loaded["state"].values()] == [3, 3, 0, 0]
    for theirs, ours in zip(old.parameters(), new.parameters(), strict=False):
        assert torch.equal(theirs, ours)
        assert torch.equal(adam.state[theirs]["exp_avg"], foo.state[ours]["exp_avg"])
    assert torch.equal(new[1].weight, fresh)
    added = ["model/1.bias", "model/1.weight"]
    added += [f"state/1.{n}/{k}" for n in ("bias", "weight") for k in foo.state[ours]]
    assert sorted(report.missing) == sorted(["groups[0].foo", *added])
    assert (report.missing_here, report.num_missing) == (report.missing, 9)
    assert report.unexpected == ()
    assert "9 not in the checkpoint, left as they were: groups[0].foo, model/1.bias" in str(report)


def test_what_only_the_checkpoint_has_is_listed_and_dropped_but_for_keys_in_lists():
    files = _saved({"a": torch.ones(2), "b": {"c": torch.ones(2), "d": 1}, "g": [{"x": 1, "y": 2}]})
    report = _store(files).load_partial({"a": torch.zeros(2), "g": [{"x": 0, "z": (3,)}], "n": 4})
    assert report.tree["g"] == [{"x": 1, "y": 2, "z": (3,)}]
    assert report.tree["n"] == 4
    assert report.tree["a"].tolist() == [1, 1]
    assert report.unexpected == ("b/c", "b/d", "g[0].y")
    assert report.missing == ("g[0].z", "n")
    assert set(report.tree) == {"a", "g", "n"}


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"w": torch.zeros(3)}, r"w: expected \(3,\) float32, found \(2, 3\) float32"),
        ({"w": torch.zeros(2, 3).int()}, r"w: expected \(2, 3\) int32, found \(2, 3\) float32"),
        ({"w": 1}, r"w: expected a plain value, found \(2, 3\) float32"),
        ({"n": torch.zeros(1)}, "n: expected a tensor, found a plain value"),
    ],
)
def test_what_has_another_shape_dtype_or_kind_is_an_error_of_a_partial_load_unless_skipped(
    wanted, problem
):
    files = _saved({"w": torch.ones(2, 3), "n": 1, "v": torch.ones(1)})
    target = {"v": torch.zeros(1), **wanted}
    with pytest.raises(MismatchError, match=problem):
        _store(files).load_partial(target)
    assert target["v"].item() == 0
    report = _store(files).load_partial(target, skip=list(wanted))
    assert target["v"].item() == 1
    assert report.skipped == tuple(wanted)
    assert report.missing == ()
    assert report.tree == target
    assert "1 skipped" in str(report)


def test_paths_are_named_whole_by_what_is_above_them_or_by_a_pattern():
    files = _saved({"m": {"a.w": torch.ones(1), "b.w": torch.ones(1)}, "mm": torch.ones(1)})

    def left(*skip):
        target = {"m": {"a.w": torch.zeros(1), "b.w": torch.zeros(1)}, "mm": torch.zeros(1)}
        return _store(files).load_partial(target, skip=skip).skipped

    assert left("m") == ("m/a.w", "m/b.w")
    assert left("m/a.w") == ("m/a.w",)
    assert left("m/*.w", "mm") == ("m/a.w", "m/b.w", "mm")
    with pytest.raises(TreeError, match="skip has 'm/c', but no path of the target"):
        left("m", "m/c")
    with pytest.raises(TreeError, match="skip must be a collection of paths, got 'm'"):
        _store(files).load_partial({}, skip="m")


@pytest.mark.parametrize(
    ("there", "here", "value"),
    [
        (torch.float32, torch.bfloat16, 1.01),
        (torch.bfloat16, torch.float32, 1.01),
        (torch.float64, torch.float8_e4m3fn, 0.3),
        (torch.complex128, torch.complex64, 1 / 3),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_dtype_is_changed_where_that_was_asked_for_only(there, here, value, num_ranks):
    whole = torch.full((8,), value, dtype=there)
    files = _saved({"a": {"w": whole}, "n": torch.ones(3, dtype=torch.int64)})

    def load(comm, **options):
        tree = {"a": {"w": _part("w", comm, dtype=here)}, "n": torch.zeros(3, dtype=torch.int64)}
        _store(files, comm).load(tree, **options)
        return tree["a"]["w"].tensor

    def refused(comm):
        return load(comm)

    (told, *_) = _errors(refused, num_ranks, MismatchError)
    assert "; to round or widen it, name it in convert" in told
    parts = LocalWorld(num_ranks).run(lambda comm: load(comm, convert=["a"]))
    assert torch.equal(
        torch.cat([p.view(torch.uint8) for p in parts]), whole.to(here).view(torch.uint8)
    )


@pytest.mark.parametrize(
    ("there", "here"),
    [(torch.float32, torch.int32), (torch.int64, torch.int32), (torch.complex64, torch.float32)],
)
def test_what_would_lose_more_than_rounding_is_not_converted(there, here):
    files = _saved({"w": torch.ones(2, dtype=there)})
    with pytest.raises(MismatchError, match=r"w: expected \(2,\) \w+, found \(2,\) \w+$"):
        _store(files).load({"w": torch.zeros(2, dtype=here)}, convert=["*"])


def test_every_rank_is_told_of_what_does_not_fit_on_any_rank_once():
    files = _saved({f"stage{n}": torch.ones(8) for n in range(3)} | {"all": torch.ones(8)})

    def load(comm):
        tree = {f"stage{comm.rank}": _part("x", comm, length=5 + comm.rank), "all": torch.ones(9)}
        _store(files, comm).load({**tree, f"new{comm.rank}": torch.ones(1), "step": 1})

    told = _errors(load, 4, MismatchError)
    assert len(set(told)) == 1
    lines = [line.strip() for line in told[0].splitlines()[1:]]
    assert lines == [
        "all: expected (9,) float32, found (8,) float32",
        *(f"new{n}: expected a tensor, found nothing of that path" for n in range(4)),
        "stage0: expected (5,) float32, found (8,) float32",
        "stage1: expected (6,) float32, found (8,) float32",
        "stage2: expected (7,) float32, found (8,) float32",
        "stage3: expected a tensor, found nothing of that path",
        "step: expected a plain value, found nothing of that path",
    ]


def test_every_rank_gets_the_same_report_and_its_own_list():
    files = _saved({f"old{n}": torch.ones(2) for n in range(150)} | {"w": torch.ones(8)})

    def load(comm):
        tree = {f"stage{comm.rank}": _part("x", comm), "w": _part("w", comm), "n": comm.rank}
        report = _store(files, comm).load_partial(tree)
        assert report.missing_here == ("n", f"stage{comm.rank}")
        assert report.tree["n"] == comm.rank
        assert report.tree["w"].tensor.tolist() == [1, 1]
        return report.missing, report.num_missing, report.unexpected, report.num_unexpected

    (missing, num_missing, unexpected, num_unexpected), *others = LocalWorld(4).run(load)
    assert all(other == (missing, 5, unexpected, 150) for other in others)
    assert missing == ("n", *(f"stage{n}" for n in range(4)))
    assert num_missing == 5
    assert len(unexpected) == 100
    assert num_unexpected == 150


def test_a_target_of_which_nothing_is_there_was_not_meant():
    files = _saved({"module.w": torch.ones(2)})
    with pytest.raises(
        MismatchError, match=r"none of its paths is there; expected w, found module\.w"
    ):
        _store(files).load_partial({"w": torch.zeros(2)})
    assert _store(files).load_partial({}).unexpected == ("module.w",)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda s, r: s.save(1, None if r else {"a": 1}), TreeError, "must be a dictionary"),
        (lambda s, r: s.load(None if r else {"a": 1}), TreeError, "must be a dictionary"),
        (lambda s, r: s.load({"a": 0}, 2 if r else 1), TreeError, "rank 1: it asks for"),
        (lambda s, r: s.load({"a": 0}, "1" if r else 1), TreeError, "step must be an integer"),
        (lambda s, r: s.load_partial({"a": 0}) if r else s.load({"a": 0}), TreeError, "asks for"),
        (lambda s, r: s.load_partial({"a": 0}, skip=["a"] * r), TreeError, "it asks for"),
        (lambda s, r: s.load({"a": 0}, convert="a" * r), TreeError, "must be a collection"),
    ],
)
def test_ranks_that_ask_for_different_things_all_raise_and_none_waits(call, kind, message):
    files = _saved({"a": 1})
    told = _errors(lambda comm: call(_store(files, comm), comm.rank), 2, kind)
    assert told[0] == told[1]
    assert message in told[0]
