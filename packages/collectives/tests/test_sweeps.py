import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives.cost import cost
from trainwright.collectives.errors import UsageError
from trainwright.collectives.sweeps import Fit, Measurement, Route, fit
from trainwright.collectives.topology import Topology

MIB = 2**20
PUBLISHED = {
    sweep["name"]: sweep
    for sweep in json.loads((Path(__file__).parent / "published_sweeps.json").read_text())["sweeps"]
}


def points_of(name, smallest=0):
    sweep = PUBLISHED[name]
    return [
        Measurement.of_bus_bandwidth(sweep["collective"], sweep["ranks"], num_bytes, busbw * 1e9)
        for num_bytes, busbw in sweep["points"]
        if num_bytes >= smallest
    ]


FABRICS = [
    pytest.param("gb200_rack", ["gb200_two_racks"], 0.10, id="one rack tells two racks"),
    pytest.param("gb200_two_racks", ["gb200_rack"], 0.11, id="two racks tell one rack"),
    pytest.param(
        "h200", ["h200_5", "h200_6", "h200_7", "h200_8"], 0.10, id="eight devices tell fewer"
    ),
]


@pytest.mark.parametrize(("known", "others", "within"), FABRICS)
def test_one_sweep_predicts_the_others_of_its_fabric(known, others, within):
    fabric = fit(points_of(known, MIB), Route(PUBLISHED[known]["route"]))

    predicted = [point for other in others for point in points_of(other, MIB)]

    # The rule is 20% above 1 MiB; what is reached is kept.
    worst = max(abs(fabric.error(point)) for point in predicted)
    assert worst < within < 0.20, fabric.format_errors(predicted)
    assert {PUBLISHED[name]["fabric"] for name in others} == {PUBLISHED[known]["fabric"]}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("name", "within"), [("a100", 0.19), ("h200", 0.06), ("b200", 0.195)])
def test_every_second_point_of_a_sweep_predicts_those_between(name, within, first):
    points = points_of(name, MIB)
    fabric = fit(points[first::2], Route(PUBLISHED[name]["route"]))

    between = [point for point in points[1 - first :: 2] if point.num_bytes > MIB]

    worst = max(abs(fabric.error(point)) for point in between)
    assert worst < within < 0.20, fabric.format_errors(between)
    # A tenth of the largest ones, which is what training sends.
    assert all(abs(fabric.error(point)) < 0.1 for point in between if point.num_bytes >= 2**33)


def test_two_rings_predict_other_numbers_of_devices_and_other_collectives():
    # Two large sizes say nothing of latency, and none is read out of them.
    [four], [large] = points_of("h200_ring_4"), points_of("h200_ring_16GiB")

    fabric = fit([four, large])

    names = ["h200_ring_5", "h200_ring_6", "h200_ring_7", "h200_ring_8", "h200_gather"]
    for name in [*names, "h200_scatter"]:
        [point] = points_of(name)
        assert abs(fabric.error(point)) < 0.02
    assert (fabric.latency_s, fabric.ramp) == (0, 0)
    assert fabric.bytes_per_s == pytest.approx(365e9, rel=0.02)


def test_the_model_without_a_ramp_misses_what_the_ramp_explains():
    points = points_of("a100", MIB)
    fabric = fit(points)
    straight = Fit(fabric.route, fabric.latency_s, 0.0, fabric.bytes_per_s)

    assert max(abs(fabric.error(point)) for point in points) < 0.20
    assert max(abs(straight.error(point)) for point in points) > 0.25


@settings(max_examples=8)
@given(
    route=st.sampled_from(Route),
    latency_us=st.floats(0.1, 50),
    ramp=st.sampled_from([0.0, 1e-9, 1e-8]),
    gigabytes=st.floats(1, 900),
)
def test_constants_that_made_the_points_are_found_again(route, latency_us, ramp, gigabytes):
    made = Fit(route, latency_us * 1e-6, ramp, gigabytes * 1e9)
    points = [
        Measurement("all_reduce", ranks, size, made.time_s("all_reduce", ranks, size))
        for ranks, size in itertools.product([2, 8], [2**10, 2**16, 2**22, 2**30])
    ]

    found = fit(points, route)

    assert found.latency_s == pytest.approx(made.latency_s, rel=1e-6)
    assert found.ramp == pytest.approx(made.ramp, rel=1e-6, abs=1e-14)
    assert found.bytes_per_s == pytest.approx(made.bytes_per_s, rel=1e-6)


def test_without_a_ramp_a_fit_is_the_cost_of_the_ring_over_its_link():
    fabric = Fit(Route.RING, 3e-6, 0.0, 200e9)
    topology = Topology(1, 6, fabric.link, fabric.link)

    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        expected = cost(collective, "ring", 3 * MIB, topology).time_s
        assert fabric.time_s(collective, 6, 3 * MIB) == pytest.approx(expected)


def test_bus_bandwidths_and_times_are_the_same_points():
    # 8 devices, 1 GiB in 8203.9 us: printed as 229.04 GB/s.
    timed = Measurement("all_reduce", 8, 2**30, 8203.9e-6)
    printed = Measurement.of_bus_bandwidth("all_reduce", 8, 2**30, 229.04e9)

    assert timed.bus_bytes_per_s == pytest.approx(229.04e9, rel=1e-4)
    assert printed.time_s == pytest.approx(timed.time_s, rel=1e-4)


def test_errors_are_printed_a_line_a_point():
    points = points_of("gb200_two_racks")

    lines = fit(points_of("gb200_rack")).format_errors(points).splitlines()

    assert len(lines) == 1 + len(points)
    assert lines[0].split() == (
        ["collective", "ranks", "size", "us", "GB/s", "predicted", "us", "GB/s", "error"]
    )
    assert lines[1].split()[:4] == ["all_reduce", "128", "512", "MiB"]
    assert len(set(map(len, lines))) == 1


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: fit(points_of("h200_ring_4")), "1 points do not tell latency from bandwidth"),
        (
            lambda: fit([Measurement("all_reduce", 2, size, 1e-3) for size in (8, 16)]),
            "times do not grow",
        ),
        (lambda: Measurement("all_reduce", 1, 8, 1.0), "needs two ranks"),
        (lambda: Measurement("all_reduce", 2, 8, 0.0), "needs two ranks, bytes and seconds"),
        (lambda: Measurement("allreduce", 2, 8, 1.0), "did you mean 'all_reduce'"),
        (lambda: Measurement.of_bus_bandwidth("reduce", 2, 8, 0.0), "must be positive"),
        (lambda: fit(points_of("h200_gather") * 2, Route.SWITCH), "points do not tell"),
        (
            lambda: Fit(Route.SWITCH, 0.0, 0.0, 1.0).time_s("all_gather", 2, 8),
            "nothing is added for all_gather",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused(mistake, message):
    with pytest.raises(UsageError, match=message):
        mistake()
