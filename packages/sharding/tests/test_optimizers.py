"""Optimizers of PyTorch on pieces train as they do on the plain module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, ShardSpec
from trainwright.sharding.data import parameter_groups
from trainwright.sharding.data.optimizers import ELEMENT_WISE
from trainwright.sharding.data.testing import Network, NetworkPlan, network_plans, wrap
from trainwright.sharding.data.units import UnitRule, by_class

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SHAPES = {"matrix": (3, 5), "bias": (7,), "cube": (2, 1, 2), "scalar": ()}
Groups = Callable[[nn.Module], Any]


class Weighted(nn.Module):
    """Parameters of many shapes; the gradient of each is what the forward weighs it with."""

    def __init__(self) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            values = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64)
            self.register_parameter(name, nn.Parameter((values + number).view(shape) / 8))
        self.fixed = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.nothing = nn.Parameter(torch.ones(0, 2, dtype=torch.float64))
        self.again = self.matrix

    def forward(self, factor: float) -> torch.Tensor:
        parameters = [getattr(self, name) for name in SHAPES]
        return torch.stack([(p * _weights(p) * factor).sum() for p in parameters]).sum()


def _weights(parameter: torch.Tensor) -> torch.Tensor:
    values = torch.arange(float(parameter.numel()), dtype=parameter.dtype)
    return (values % 5 - 2).view(parameter.shape)


def factors(step: int, num_ranks: int) -> list[float]:
    """Return whole numbers, so that sums over ranks are exact in any order."""
    return [float((step * 3 + rank * 5) % 7 - 3) for rank in range(num_ranks)]


def train_plain(make: Callable[[Any], torch.optim.Optimizer], groups: Groups, ranks: int) -> Any:
    module = Weighted()
    optimizer = make(groups(module))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(3):
        optimizer.zero_grad()
        for factor in factors(step, ranks):
            module(factor).backward()
        optimizer.step()
        scheduler.step()
    return module.state_dict()


def train_pieces(
    comm: Communicator, stage: int, make: Callable[[Any], torch.optim.Optimizer], groups: Groups
) -> Any:
    parallel = wrap(Weighted(), comm, stage=stage)
    optimizer = make(parameter_groups(parallel, groups(parallel.module)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(3):
        parallel.zero_grad()
        parallel.module(factors(step, comm.size)[comm.rank]).backward()
        parallel.reduce()
        parallel.wait()
        optimizer.step()
        parallel.publish()
        parallel.await_weights()
        scheduler.step()
    return {name: value.clone() for name, value in parallel.module.state_dict().items()}


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Return groups as one writes them for the plain module."""
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.125},
        {"params": [p for p in parameters if p.ndim < 2], "lr": 0.25},
    ]


VARIANTS = [
    *((kind, {}) for kind in ELEMENT_WISE),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.5, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.5, "fused": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
]


@pytest.mark.parametrize(
    ("kind", "options", "stage"),
    [
        *((kind, options, 3) for kind, options in VARIANTS),
        *((kind, options, stage) for kind, options in VARIANTS[-3:] for stage in (0, 1, 2)),
    ],
    ids=str,
)
def test_groups_of_pieces_train_as_the_plain_modules_groups(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], stage: int
) -> None:
    def make(groups: Any) -> torch.optim.Optimizer:
        if kind is torch.optim.Rprop:  # the one without weight decay
            for group in groups:
                group.pop("weight_decay", None)
        return kind(groups, lr=0.0625, **options)

    expected = train_plain(make, two_groups, ranks=3)
    results = LocalWorld(3).run(lambda comm: train_pieces(comm, stage, make, two_groups))

    for result in results:
        # A kernel may round a tail of a few elements otherwise than whole vectors.
        torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-14)


@given(
    plan=network_plans(),
    stage=st.integers(0, 3),
    ranks=st.integers(1, 4),
)
def test_weight_decay_by_a_rule_reaches_the_same_parameters_in_every_layout(
    plan: NetworkPlan, stage: int, ranks: int
) -> None:
    groups = [
        {"params": lambda spec: len(spec.global_shape) >= 2, "weight_decay": 0.5},
        {"params": lambda spec: len(spec.global_shape) < 2, "weight_decay": 0.0},
    ]

    def decayed(comm: Communicator) -> dict[str, torch.Tensor]:
        parallel = wrap(Network(plan), comm, stage=stage)
        optimizer = torch.optim.AdamW(parameter_groups(parallel, groups), lr=0.5)
        parallel.zero_grad()
        parallel.reduce()
        parallel.wait()
        optimizer.step()
        parallel.publish()
        parallel.await_weights()
        return {name: p.detach().clone() for name, p in parallel.module.named_parameters()}

    results = LocalWorld(ranks).run(decayed)

    for result in results:
        for name, parameter in Network(plan).named_parameters():
            decays = parameter.requires_grad and parameter.ndim >= 2
            torch.testing.assert_close(result[name], parameter.detach() * (0.75 if decays else 1))


@STAGES
def test_decay_skips_norms_and_biases_also_where_a_cut_goes_through_them(stage: int) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 2))
            self.ln_f = nn.LayerNorm(2)

    def run(comm: Communicator) -> dict[str, list[float]]:
        parallel = wrap(Plain(), comm, stage=stage)
        with torch.no_grad():
            for piece in parallel.pieces.values():
                piece.parameter.fill_(1.0)
        groups = [
            {"params": lambda spec: len(spec.global_shape) >= 2, "weight_decay": 0.1},
            {"params": lambda spec: len(spec.global_shape) < 2, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(parameter_groups(parallel, groups), lr=0.1)
        parallel.reduce()
        parallel.wait()
        optimizer.step()
        parallel.publish()
        parallel.await_weights()
        return {n: p.flatten().tolist() for n, p in parallel.module.named_parameters()}

    for found in LocalWorld(3).run(run):
        assert found["w"] == pytest.approx([0.99] * 4)
        assert found["ln_f.weight"] == [1.0, 1.0]
        assert found["ln_f.bias"] == [1.0, 1.0]


class FourLayers(nn.Sequential):
    """Four parameters of 1500 elements."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(1500, 1, bias=False) for _ in range(4)))


@STAGES
@pytest.mark.parametrize("units", [None, by_class(nn.Linear)], ids=["together", "one by one"])
def test_a_rule_on_sizes_sees_the_parameter_and_neither_piece_nor_buffer(
    stage: int, units: UnitRule | None
) -> None:
    groups = [
        {"params": lambda spec: spec.global_shape[1] >= 4096},
        {"params": lambda spec: 1000 < spec.global_shape[1] < 4096},
    ]

    def run(comm: Communicator) -> list[list[str]]:
        parallel = wrap(FourLayers(), comm, stage=stage, units=units)
        return [group["param_names"] for group in parameter_groups(parallel, groups)]

    large, small = zip(*LocalWorld(2).run(run), strict=True)

    assert large == ([], [])
    assert sorted({name for names in small for name in names}) == [f"{i}.weight" for i in range(4)]


@STAGES
def test_every_rank_has_every_group_and_lists_what_it_keeps_by_name(stage: int) -> None:
    groups = [{"params": ["scalar"]}, {"params": ["matrix", "bias", "cube"]}]

    def run(comm: Communicator) -> list[list[str]]:
        parallel = wrap(Weighted(), comm, stage=stage)
        found = parameter_groups(parallel, groups)
        optimizer = torch.optim.SGD(found, lr=0.5)
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1.0, 2.0], total_steps=9)
        for group in optimizer.param_groups:
            for name, tensor in zip(group["param_names"], group["params"], strict=True):
                assert tensor is parallel.pieces[name].parameter
        return [list(group["param_names"]) for group in optimizer.param_groups]

    ranks = LocalWorld(4).run(run)

    assert all(len(names) == 2 for names in ranks)
    keepers = [rank for rank, names in enumerate(ranks) if names[0]]
    assert keepers == ([0, 1, 2, 3] if stage == 0 else [0])


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (lambda m: m.parameters(), ["matrix", "bias", "cube", "scalar"]),
        (lambda m: m.named_parameters(), ["matrix", "bias", "cube", "scalar"]),
        (lambda m: ["again", "matrix"], ["matrix"]),
        (lambda m: [m.again, m.scalar, m.scalar], ["matrix", "scalar"]),
        (lambda m: m.bias, ["bias"]),
        (lambda m: "cube", ["cube"]),
        (lambda m: [{"params": ("bias", m.bias)}], ["bias"]),
        (lambda m: [m.fixed, m.nothing], []),
        (lambda m: lambda spec: spec.name.startswith("b"), ["bias"]),
    ],
)
@STAGES
def test_parameters_are_given_as_to_pytorch_or_by_name_or_rule_each_once(
    groups: Groups, expected: list[str], stage: int
) -> None:
    parallel = wrap(Weighted(), stage=stage)

    (found,) = parameter_groups(parallel, groups(parallel.module))

    assert found["param_names"] == expected


MISTAKES: list[tuple[Groups, str]] = [
    (lambda m: [{"params": [m.bias]}, {"params": ["bias"]}], "bias is in groups 0 and 1"),
    (lambda m: [{"params": "matrix"}, {"params": "again"}], "matrix is in groups 0 and 1"),
    (
        lambda m: [{"params": lambda spec: True}, {"params": lambda spec: True}],
        "matrix is in groups 0 and 1",
    ),
    (lambda m: ["bais"], "group 0 names 'bais'.*did you mean 'bias'"),
    (lambda m: [nn.Parameter(torch.ones(3))], r"shape \(3,\) that is no parameter of the module"),
    (lambda m: [3], "holds a int"),
    (lambda m: {m.bias}, "set, whose order differs"),
    (lambda m: [{"params": {m.bias}}], "set, whose order differs"),
    (lambda m: [{"lr": 0.5}], "group 0 has no 'params'"),
    (lambda m: {"params": [m.bias]}, "groups are a list of dicts"),
    (lambda m: [{"params": [m.bias]}, m.matrix], "mix dicts and parameters"),
    (lambda m: [], "no parameter group"),
]


@pytest.mark.parametrize(("groups", "message"), MISTAKES)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_group_that_is_wrong_is_refused_on_every_rank_alike(
    groups: Groups, message: str, stage: int
) -> None:
    def run(comm: Communicator) -> None:
        parallel = wrap(Weighted(), comm, stage=stage)
        with pytest.raises(ValueError, match=message):
            parameter_groups(parallel, groups(parallel.module))

    LocalWorld(2).run(run)


@STAGES
def test_a_rule_sees_the_whole_parameter_on_every_rank(stage: int) -> None:
    def run(comm: Communicator) -> list[ShardSpec]:
        seen: list[ShardSpec] = []
        parallel = wrap(Weighted(), comm, stage=stage)
        parameter_groups(parallel, lambda spec: bool(seen.append(spec)))
        return seen

    for seen in LocalWorld(3).run(run):
        assert {spec.name: spec.global_shape for spec in seen} == SHAPES
        assert all(spec.whole for spec in seen)


class Pair(nn.Module):
    """Two parameters, of which a forward may leave the second out."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(3))

    def forward(self, uses_b: bool) -> torch.Tensor:
        return self.a.sum() + self.b.sum() if uses_b else self.a.sum()


@STAGES
@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"fused": True}, {"foreach": True}], ids=str
)
def test_each_parameter_counts_its_own_steps_whatever_groups_it_is_in(
    stage: int, options: dict[str, Any]
) -> None:
    single = nn.Parameter(torch.zeros(3))
    serial = torch.optim.Adam([single], lr=1e-3, **options)
    expected: list[torch.Tensor] = []
    for _ in range(3):
        single.grad = torch.ones(3)
        serial.step()
        expected.append(single.detach().clone())

    def run(comm: Communicator) -> None:
        parallel = wrap(Pair(), comm, stage=stage, alignment=4)
        groups = parameter_groups(parallel, [{"params": ["b"]}, {"params": ["a"]}])
        optimizers = [torch.optim.Adam([group], lr=1e-3, **options) for group in groups]
        for step in range(3):
            parallel.zero_grad()
            if comm.rank == 0:
                parallel.module(uses_b=step != 1).backward()
            parallel.reduce()
            parallel.wait()
            for optimizer in optimizers:
                optimizer.step()
            for name, piece in parallel.pieces.items():
                if name == "a" or step == 0:
                    moved = piece.parameter.detach()
                    assert torch.equal(moved, expected[step][: moved.numel()])
            parallel.publish()
            parallel.await_weights()
        for optimizer in optimizers:
            assert all(state["step"] == 3 for state in optimizer.state.values())

    LocalWorld(2).run(run)

    assert expected[0].tolist() == pytest.approx([-1e-3] * 3, abs=1e-9)


@STAGES
def test_pytorchs_scaler_goes_through_its_loop_on_pieces(stage: int) -> None:
    def train(module: nn.Module, optimizer: torch.optim.Optimizer, parallel: Any) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        scales: list[float] = []
        for step in range(4):
            module.zero_grad() if parallel is None else parallel.zero_grad()
            bad = torch.inf if step == 1 else 1.0
            scaler.scale(module(step + 1.0) * bad).backward()
            if parallel is not None:
                parallel.reduce()
                parallel.wait()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if parallel is not None:
                parallel.publish()
                parallel.await_weights()
            scales.append(scaler.get_scale())
        return scales

    plain = Weighted().float()
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.numel()], lr=0.125)
    scales = train(plain, optimizer, None)
    parallel = wrap(Weighted().float(), stage=stage)
    pieces = torch.optim.AdamW(parameter_groups(parallel, parallel.module.parameters()), lr=0.125)
    found = train(parallel.module, pieces, parallel)
    parallel.await_weights()

    assert found == scales == [8.0, 4.0, 4.0, 8.0]
    torch.testing.assert_close(parallel.module.state_dict(), plain.state_dict())
