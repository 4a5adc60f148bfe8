"""Health reports count what a format and a step lose, on one rank or many, all or a sample."""

import json
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import LocalWorld
from trainwright.precision import MasterWeights, PrecisionError, policy
from trainwright.precision.formats import BF16, E2M1, E4M3, E5M2, E8M0, FP16, FP32
from trainwright.precision.health import Sample, ScaleHistory, UpdateWatch, range_report
from trainwright.precision.testing import CountingCommunicator

FORMATS = [E2M1, E4M3, E5M2, FP16, BF16, FP32]


def by_brute_force(values, format, scale):
    """Round every element in float64 and look at it."""
    scaled = values.double() * scale
    if values.dtype != torch.float64:
        scaled = (values.float() * scale).double()
    rounded = format.decode(format.encode(scaled, saturate=False), dtype=torch.float64)
    finite = values.isfinite()
    clamped = format.decode(format.encode_clamped(scaled), dtype=torch.float64)
    step = 2.0**format.emax * format.eps
    tie = scaled.abs() == format.max + step / 2
    if format.has_infinity or format.has_nan:
        beyond = ~rounded.isfinite()
    else:
        beyond = (scaled.abs() > format.max + step / 2) | (tie & bool(format.max_code % 2))
    assert not bool((beyond & finite & (clamped.abs() != format.max)).any())
    return (
        int(((rounded == 0) & (values != 0) & ~values.isnan()).sum()),
        int((beyond & finite).sum()),
        int((~finite).sum()),
    )


def edges(format):
    """Numbers on both sides of every limit of a format."""
    smallest = (format.min_subnormal or format.min_normal) / 2
    largest = format.max + 2.0**format.emax * format.eps / 2
    found = [0.0, -0.0, math.inf, -math.inf, math.nan]
    for number in (smallest, largest, format.max, format.min_normal):
        found += [number, -number, math.nextafter(number, 0), math.nextafter(number, math.inf)]
    return found


@given(
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([1.0, 2.0**16, 2.0**-10, 3.0, 1e30]),
    values=st.lists(st.floats(width=32), max_size=30),
)
@example(format=E4M3, dtype=torch.float64, scale=1.0, values=[464.0, 465.0])
@example(format=FP16, dtype=torch.float64, scale=1.0, values=[65520.0, 65519.0])
def test_counts_are_those_of_rounding_every_element(format, dtype, scale, values):
    tensor = torch.tensor([*values, *edges(format)], dtype=torch.float64).to(dtype)

    found = range_report({"w": tensor}, format, scale=scale)["w"]

    shares = (found.underflow, found.overflow, found.non_finite)
    assert tuple(share.part for share in shares) == by_brute_force(tensor, format, scale)
    assert {share.whole for share in shares} == {tensor.numel()}
    assert {share.error for share in shares} == {0.0}
    assert found.num_looked_at == found.num_elements == tensor.numel()


def test_large_and_strided_tensors_are_counted_piece_by_piece_as_a_whole():
    tensor = torch.randn(300, 257, 2).transpose(0, 2)[:, ::2] * 1e-3

    found = range_report([("w", tensor)], E4M3)["w"]

    assert tensor.numel() > 1 << 16
    assert found.underflow.part == by_brute_force(tensor, E4M3, 1.0)[0] > 0


def test_gradients_in_true_units_show_what_their_loss_scale_saved():
    gradients = {"up.weight": torch.tensor([2.0**-30, 2.0**-10, 8.0]), "up.bias": None}

    before = range_report(gradients, FP16)
    scaled = range_report(gradients, FP16, scale={"up.weight": 2.0**16, "up.bias": 1.0})

    assert (before["up.weight"].underflow.part, before["up.weight"].overflow.part) == (1, 0)
    assert (scaled["up.weight"].underflow.part, scaled["up.weight"].overflow.part) == (0, 1)
    assert scaled["up.weight"].overflow.value == 1 / 3
    assert before["up.bias"].underflow.value == 0.0
    assert str(scaled).splitlines()[:2] == [
        "FP16       elements  underflow  overflow  not finite",
        "up.weight         3     0.000%   33.333%      0.000%",
    ]


def test_ranks_count_their_parts_by_one_all_reduce():
    whole = torch.randn(7, 9) * 2.0**-9
    parts = [whole[:2], None, whole[2:]]

    def report(communicator):
        own = {"w": parts[communicator.rank], "b": torch.ones(2)}
        return range_report(own, E4M3, communicator=communicator)

    reports = LocalWorld(3).run(report)

    alone = range_report({"w": whole, "b": torch.ones(6)}, E4M3)
    assert reports == [alone] * 3
    counting = CountingCommunicator()
    range_report({"w": whole, "b": torch.ones(6)}, E4M3, communicator=counting)
    assert (counting.num_all_reduces, counting.num_bytes) == (1, 8 * (3 + 2 * 17))


def test_ranks_with_other_names_are_refused_on_every_rank():
    def report(communicator):
        name = "w" if communicator.rank < 2 else "v"
        with pytest.raises(PrecisionError, match="different names"):
            range_report({name: torch.ones(1)}, E4M3, communicator=communicator)
        return True

    assert LocalWorld(3).run(report) == [True] * 3


def test_a_sample_states_the_error_that_it_makes():
    torch.manual_seed(0)
    tensor = torch.randn(20_000) * 2.0**-9
    exact = range_report({"w": tensor}, E4M3)["w"].underflow.value
    misses = []
    for step in range(60):
        found = range_report({"w": tensor}, E4M3, sample=Sample(500, step=step))["w"]
        assert found.num_looked_at == 500
        assert found.underflow.error == pytest.approx(
            math.sqrt(exact * (1 - exact) / 500), rel=0.15
        )
        misses.append((found.underflow.value - exact) / found.underflow.error)

    assert math.sqrt(sum(miss**2 for miss in misses) / 60) == pytest.approx(1.0, abs=0.3)
    assert len(set(misses)) > 30


def test_a_sample_that_meets_nothing_does_not_claim_to_be_exact():
    found = range_report({"w": torch.ones(1000)}, FP16, sample=Sample(98))["w"]

    assert found.overflow.value == 0.0
    assert found.overflow.error == pytest.approx(0.01, rel=0.02)
    assert str(found.overflow).startswith("0.000% ± 1.0")


def test_ranks_of_unequal_size_weigh_in_a_sample_by_their_elements():
    def report(communicator):
        bad = communicator.rank == 0
        tensor = torch.full((900 if bad else 100,), 1e-9 if bad else 1.0)
        found = range_report(
            {"w": tensor}, FP16, sample=Sample(200, seed=5), communicator=communicator
        )
        return found["w"].underflow.value, found["w"].num_looked_at

    assert LocalWorld(2).run(report) == [(0.9, 300)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"w": torch.ones(1)}, E8M0, 1.0), "signed formats, got E8M0"),
        (({"w": torch.ones(1)}, FP16, 0.0), "scale of w must be positive"),
        (({"w": torch.ones(1)}, FP16, {"v": 1.0}), r"a number for w, it has \['v'\]"),
        (({"w": torch.ones(1, dtype=torch.int8)}, FP16, 1.0), "w must be floating-point"),
    ],
)
def test_what_cannot_be_counted_is_refused(arguments, message):
    tensors, format, scale = arguments
    with pytest.raises(PrecisionError, match=message):
        range_report(tensors, format, scale=scale)


@pytest.mark.parametrize("wrong", [0, 1.5, True])
def test_a_sample_of_no_elements_is_refused(wrong):
    with pytest.raises(PrecisionError, match="whole number from 1"):
        Sample(wrong)


def drawn_weight(shape=(257, 300)):
    return nn.Parameter(torch.rand(shape) + 0.5)


def lost_by_brute_force(before, after, dtype):
    updated = before != after
    lost = updated & (before.to(dtype) == after.to(dtype))
    return int(updated.sum()), int(lost.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_of_wide_weights_are_lost_where_both_round_alike(dtype):
    weight = drawn_weight()
    weight.grad = torch.randn(300, 257).t() * (torch.rand(weight.shape) > 0.1)
    before = weight.detach().clone()
    watch = UpdateWatch([("w", weight)], dtype)

    watch.start()
    torch.optim.SGD([weight], lr=1e-3).step()
    lost = watch.finish()["w"].lost

    assert (lost.whole, lost.part) == lost_by_brute_force(before, weight.detach(), dtype)
    assert 0 < lost.part < lost.whole < weight.numel()
    assert lost.error == 0.0


def test_updates_of_narrow_weights_are_lost_where_a_gradient_moved_nothing():
    weight = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16).t())
    weight.grad = torch.tensor([[1e-3, 1.0], [0.0, -1.0], [1e-3, 0.0]], dtype=torch.bfloat16)
    still = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    watch = UpdateWatch([("w", weight), ("still", still)], torch.bfloat16)

    watch.start()
    torch.optim.SGD([weight], lr=0.5).step()
    report = watch.finish()

    assert (report["w"].lost.part, report["w"].lost.whole) == (2, 4)
    assert (report["still"].lost.value, report["still"].lost.whole) == (0.0, 0)
    assert str(report).splitlines()[1].split() == ["w", "6", "4", "50.000%"]


def test_masters_show_what_a_model_without_them_would_lose():
    model = nn.Linear(3, 2, bias=False)
    applied = policy("bfloat16").apply(model)
    optimizer = MasterWeights(
        model.named_parameters(),
        lambda groups: torch.optim.SGD(groups, lr=1e-5),
        originals=applied.originals,
    )
    masters = optimizer.state_dict()["masters"]
    before = masters["weight"].clone()
    watches = [
        UpdateWatch(named, torch.bfloat16) for named in (masters.items(), model.named_parameters())
    ]
    model(torch.ones(1, 3)).sum().backward()

    for watch in watches:
        watch.start()
    optimizer.step()
    of_masters, of_model = (watch.finish()["weight"].lost for watch in watches)

    assert lost_by_brute_force(before, masters["weight"], torch.bfloat16) == (6, of_masters.part)
    assert of_masters == of_model


def test_ranks_and_samples_estimate_one_share_of_lost_updates():
    generator = torch.Generator().manual_seed(1)
    befores = [torch.rand(9000, generator=generator) + 0.5 for _ in range(2)]
    changes = [torch.randn(9000, generator=generator) * 1e-3 for _ in range(2)]
    changes[0][:6000] = 0.0
    counts = [
        lost_by_brute_force(before, before + change, torch.bfloat16)
        for before, change in zip(befores, changes, strict=True)
    ]
    exact = sum(lost for _, lost in counts) / sum(updated for updated, _ in counts)

    def train(communicator):
        weight = nn.Parameter(befores[communicator.rank].clone())
        found = []
        for sample in (None, *(Sample(400, step=step) for step in range(12))):
            watch = UpdateWatch([("w", weight)], torch.bfloat16)
            with torch.no_grad():
                weight.copy_(befores[communicator.rank])
                watch.start(sample, communicator=communicator)
                weight += changes[communicator.rank]
            found.append(watch.finish(communicator)["w"].lost)
        return found

    first, second = LocalWorld(2).run(train)

    assert first == second
    assert first[0].value == exact
    misses = [(share.value - exact) / share.error for share in first[1:]]
    assert 0.4 < math.sqrt(sum(miss**2 for miss in misses) / 12) < 1.6


def test_a_watch_that_cannot_compare_says_so():
    weight = nn.Parameter(torch.ones(2))
    watch = UpdateWatch([("w", weight)], torch.bfloat16)

    with pytest.raises(PrecisionError, match="without start"):
        watch.finish()
    with pytest.raises(PrecisionError, match=r"bfloat16 or float16, got torch\.float32"):
        UpdateWatch([("w", weight)], torch.float32)
    with pytest.raises(PrecisionError, match=r"w must be float32.*got torch\.float16"):
        UpdateWatch([("w", weight.half())], torch.bfloat16)


@pytest.mark.parametrize(
    "state",
    [7, [], {"loss": 7}, {"loss": [7]}, {"loss": [[0]]}, {"loss": [[0.5, 1.0]]}, {"a": [[0, "1"]]}],
)
def test_what_is_no_history_of_scales_is_refused_and_changes_nothing(state):
    history = ScaleHistory()
    history.record(1, {"loss": 2.0})
    with pytest.raises(PrecisionError):
        history.load_state_dict(state)
    assert history.changes("loss") == ((1, 2.0),)


def test_a_history_keeps_the_changes_of_scales_through_a_restart():
    history = ScaleHistory(max_changes=3)
    for step, scale in enumerate([4.0, 4.0, 2.0, 2.0, 8.0, 1.0]):
        history.record(step, {"loss": scale, "amax": 1.0})
    resumed = ScaleHistory(max_changes=3)

    resumed.load_state_dict(json.loads(json.dumps(history.state_dict())))

    assert resumed == history
    assert resumed.changes("loss") == ((2, 2.0), (4, 8.0), (5, 1.0))
    assert resumed.changes("amax") == ((0, 1.0),)
    assert resumed.changes("other") == ()
    assert str(resumed).splitlines() == [
        "scale  now  least  most  falls  rises  since step",
        "loss     1      1     8      1      1           5",
        "amax     1      1     1      0      0           0",
    ]
    with pytest.raises(PrecisionError, match="scales of step 4 come after those of step 5"):
        resumed.record(4, {"loss": 2.0})


def test_a_history_of_no_changes_is_refused():
    with pytest.raises(PrecisionError, match="max_changes must be a whole number from 1"):
        ScaleHistory(0)


def test_the_error_of_lost_updates_is_that_of_a_share_of_the_updated_elements():
    weight = nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
    weight.grad = torch.zeros(10_000, dtype=torch.bfloat16)
    weight.grad[:1500], weight.grad[1500:3000] = 1.0, 1e-3
    watch = UpdateWatch([("w", weight)], torch.bfloat16)

    watch.start(Sample(2000))
    torch.optim.SGD([weight], lr=1.0).step()
    lost = watch.finish()["w"].lost

    share, seen = lost.value, 2000 * lost.whole / 10_000
    assert abs(share - 0.5) < 4 * lost.error
    assert lost.error == pytest.approx(math.sqrt(share * (1 - share) / seen), rel=0.02)
