"""Updates of offloaded states: what is in memory at once, and what is refused."""

from __future__ import annotations

import errno
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator
from trainwright.sharding import Mesh, MeshShape, NotAvailableError, ShardingError
from trainwright.sharding.data import (
    DataParallel,
    ShardPolicy,
    WholeMatrices,
    by_class,
    data_parallel,
    full_state_dict,
    load_full,
    offloaded_step,
    parameter_groups,
)
from trainwright.sharding.data.away import Turns
from trainwright.sharding.offload import (
    FileStore,
    HostMemory,
    Offload,
    OffloadedStep,
    OffloadError,
    offload_to_folder,
    offload_to_host,
)

WIDTH, DEPTH = 64, 12
ELEMENTS = DEPTH * (WIDTH + 1) * WIDTH
MIXED_STATES = 16 * ELEMENTS
"""Weights and gradients of sixteen bits, masters and two moments of thirty-two."""


def tower(depth: int = DEPTH) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(depth)]
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return nn.Sequential(*layers)


def shared_out(
    offload: Offload | None, stage: int, world: Communicator | None = None, **policy: Any
) -> DataParallel:
    world = SingleCommunicator() if world is None else world
    chosen = ShardPolicy(
        stage=stage,
        units=by_class(nn.Linear),
        bucket_bytes=4 * (WIDTH + 1) * WIDTH,
        parameter_dtype=lambda name, parameter: torch.bfloat16,
        **policy,
    )
    return data_parallel(tower(), Mesh(world, MeshShape(dp=world.size)), chosen, offload=offload)


def adamw(parallel: DataParallel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(parallel, list(parallel.module.parameters())))


def train(parallel: DataParallel, stepping: OffloadedStep, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        parallel.zero_grad()
        inputs = torch.full((4, WIDTH), 0.1 * (step + 1), dtype=torch.bfloat16)
        parallel.last_backward()
        loss = parallel.module(inputs).float().square().sum()
        loss.backward()
        losses.append(float(loss.detach()))
        parallel.reduce()
        parallel.wait()
        stepping.step()
        parallel.publish()
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_three_units_are_in_memory_while_states_in_a_file_are_updated(
    stage: int, tmp_path: Path
) -> None:
    offload = offload_to_folder(tmp_path, weights=stage == 3)
    parallel = shared_out(offload, stage)
    stepping = offloaded_step(adamw(parallel), [parallel], offload)
    ledger = offload.states.ledger
    # Masters, gradients, two moments, and room to round weights that are in the file too.
    assert 16 <= stepping.unit_bytes / ((WIDTH + 1) * WIDTH) < 20

    peaks = []
    for _ in range(3):
        train(parallel, stepping, 1)
        peaks.append(ledger.peak_bytes)

    assert 2 * stepping.unit_bytes <= peaks[0] <= 3 * stepping.unit_bytes  # states are made in it
    assert peaks[1:] == [3 * stepping.unit_bytes] * 2
    assert ledger.held_bytes == 3 * stepping.unit_bytes  # used again
    assert list(tmp_path.iterdir()) == []


MODES = {
    "states in host memory": (2, 6, lambda folder: offload_to_host(device_limit_bytes=BUDGET)),
    "weights too": (
        3,
        3,
        lambda folder: offload_to_host(weights=True, device_limit_bytes=BUDGET // 2),
    ),
    "states in a file": (
        2,
        6,
        lambda folder: offload_to_folder(folder, device_limit_bytes=BUDGET),
    ),
    "states and weights in a file": (
        3,
        3,
        lambda folder: offload_to_folder(folder, weights=True, device_limit_bytes=BUDGET // 2),
    ),
}
BUDGET = MIXED_STATES // 4


@pytest.mark.parametrize("mode", list(MODES))
def test_a_model_whose_states_exceed_the_device_trains_within_its_budget(
    mode: str, tmp_path: Path
) -> None:
    stage, most, make = MODES[mode]
    offload = make(tmp_path)
    assert offload.device.limit_bytes is not None
    parallel = shared_out(offload, stage)
    stepping = offloaded_step(adamw(parallel), [parallel], offload)

    losses = train(parallel, stepping, 4)

    assert losses[-1] < losses[0] * 20  # inputs grow by steps; none is lost
    assert all(loss == loss for loss in losses)
    assert offload.device.peak_bytes <= offload.device.limit_bytes < MIXED_STATES
    assert offload.device.peak_bytes <= most * ELEMENTS


def test_what_would_exceed_the_devices_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"the device would hold .* bytes of model states"):
        shared_out(offload_to_host(device_limit_bytes=ELEMENTS), 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_device_holds_weights_and_gradients_of_few_units(stage: int) -> None:
    offload = offload_to_host(weights=stage == 3)
    parallel = shared_out(offload, stage)
    stepping = offloaded_step(adamw(parallel), [parallel], offload)
    unit = (WIDTH + 1) * WIDTH
    weights, gradients = 2 * ELEMENTS, 4 * ELEMENTS

    train(parallel, stepping, 1)

    # From stage 2 on gradients leave unit by unit: one is moved while the next one is computed.
    wanted = [weights + gradients] * 2 + [weights + 2 * 4 * unit, 2 * 2 * unit + 2 * 4 * unit]
    assert offload.device.peak_bytes <= wanted[stage]
    assert (
        offload.device.held_bytes == [weights + gradients, weights + gradients, weights, 0][stage]
    )


def test_a_full_disk_is_met_on_every_rank_before_anything_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.posix_fallocate
    known: set[int] = set()

    def once(descriptor: int, start: int, size: int) -> None:
        if descriptor in known:  # masters have found space; now it is the optimizer's states
            raise OSError(errno.ENOSPC, "No space left on device")
        known.add(descriptor)
        usual(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", once)

    def run(world: Communicator) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        offload = offload_to_folder(tmp_path)
        parallel = shared_out(offload, 1, world, alignment=1)
        before = {name: p.parameter.detach().clone() for name, p in parallel.pieces.items()}
        with pytest.raises(OffloadError) as caught:
            offloaded_step(adamw(parallel), [parallel], offload)
        after = {name: p.parameter.detach().clone() for name, p in parallel.pieces.items()}
        return str(caught.value), before, after

    for message, before, after in LocalWorld(2, timeout_s=30.0).run(run):
        assert "no space" in message
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_space_for_masters_is_met_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.posix_fallocate
    lucky: list[int] = []

    def first_only(descriptor: int, start: int, size: int) -> None:
        lucky.append(descriptor)
        if descriptor != lucky[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        usual(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", first_only)

    def run(world: Communicator) -> str:
        with pytest.raises(OffloadError) as caught:
            shared_out(offload_to_folder(tmp_path), 1, world)
        return str(caught.value)

    assert all("no space" in said for said in LocalWorld(2, timeout_s=30.0).run(run))


def test_a_file_that_fails_in_an_update_leaves_parameters_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = offload_to_folder(tmp_path)
    parallel = shared_out(offload, 2)
    stepping = offloaded_step(adamw(parallel), [parallel], offload)
    train(parallel, stepping, 1)
    usual = os.preadv
    reads = []

    def failing(*arguments: Any) -> int:
        reads.append(1)
        if len(reads) > 8:
            raise OSError(errno.EIO, "Input/output error")
        return usual(*arguments)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OffloadError, match="Input/output error"):
        train(parallel, stepping, 1)

    assert offload.states.ledger.held_bytes <= 2 * stepping.unit_bytes
    assert all(bool(p.parameter.isfinite().all()) for p in parallel.pieces.values())


def test_states_that_were_loaded_are_the_ones_that_are_updated(tmp_path: Path) -> None:
    found = []
    for make in (offload_to_host, lambda: offload_to_folder(tmp_path)):
        offload = make()
        parallel = shared_out(offload, 2)
        optimizer = adamw(parallel)
        stepping = offloaded_step(optimizer, [parallel], offload)
        train(parallel, stepping, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        stepping.take_in()
        train(parallel, stepping, 1)
        optimizer.load_state_dict(optimizer.state_dict())
        train(parallel, stepping, 1)
        found.append({name: p.parameter.detach().clone() for name, p in parallel.pieces.items()})

    parallel = shared_out(None, 2)
    optimizer = adamw(parallel)
    train(parallel, optimizer, 2)  # type: ignore[arg-type]
    train(parallel, optimizer, 1)  # type: ignore[arg-type]
    train(parallel, optimizer, 1)  # type: ignore[arg-type]
    for name, piece in parallel.pieces.items():
        assert torch.equal(found[0][name], piece.parameter)
        assert torch.equal(found[1][name], piece.parameter)


def test_each_parameter_counts_its_own_updates() -> None:
    # A count that all units shared would give the later ones another bias correction.
    offload = offload_to_host()
    parallel = shared_out(offload, 1)
    optimizer = adamw(parallel)
    stepping = offloaded_step(optimizer, [parallel], offload)

    train(parallel, stepping, 2)

    counts = {int(states["step"]) for states in optimizer.state.values()}
    assert counts == {2}


@pytest.mark.parametrize("to_file", [False, True], ids=["host", "file"])
def test_a_plain_models_state_goes_in_and_comes_out(to_file: bool, tmp_path: Path) -> None:
    wanted = {name: tensor + 1 for name, tensor in tower().state_dict().items()}

    def run(world: Communicator) -> dict[str, torch.Tensor]:
        offload = offload_to_folder(tmp_path, weights=True) if to_file else offload_to_host()
        parallel = shared_out(offload, 3, world)
        load_full(parallel, wanted if world.rank == 0 else None)
        parallel.await_weights()
        for name, parameter in parallel.module.named_parameters():
            assert torch.equal(parameter.detach(), wanted[name].bfloat16())
        parallel.release()
        return full_state_dict(parallel)

    found = LocalWorld(2, timeout_s=30.0).run(run)[0]

    assert all(torch.equal(found[name], wanted[name].bfloat16()) for name in wanted)


def test_weights_that_were_edited_in_the_module_are_taken_over(tmp_path: Path) -> None:
    parallel = shared_out(offload_to_folder(tmp_path, weights=True), 3)
    parallel.await_weights()
    with torch.no_grad():
        for parameter in parallel.module.parameters():
            parameter.fill_(0.25)

    parallel.load_masters()
    parallel.release()
    parallel.await_weights()

    assert all(bool((piece.parameter == 0.25).all()) for piece in parallel.pieces.values())
    assert all(bool((p == 0.25).all()) for p in parallel.module.parameters())


class Scheduled(torch.optim.SGD):
    """Counts in its options, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda groups: torch.optim.Adafactor(groups), "sums over whole rows"),
        (lambda groups: Scheduled(groups, lr=0.1), "changes its options"),
    ],
    ids=["Adafactor", "counting"],
)
def test_optimizers_that_cannot_be_taken_in_parts_are_refused(make: Any, message: str) -> None:
    offload = offload_to_host()
    parallel = shared_out(offload, 1)
    groups = parameter_groups(parallel, list(parallel.module.parameters()))

    with pytest.raises(NotAvailableError, match=message):
        offloaded_step(make([{**group, "count": 0} for group in groups]), [parallel], offload)


def test_what_one_rank_finds_wrong_with_an_optimizer_is_met_on_every_rank() -> None:
    def run(world: Communicator) -> str:
        offload = offload_to_host()
        parallel = shared_out(offload, 1, world, alignment=1)
        optimizer = adamw(parallel)
        if world.rank == 1:
            optimizer.add_param_group(
                {"params": [nn.Parameter(torch.zeros(2))], "param_names": ["new"]}
            )
        with pytest.raises(ShardingError) as caught:
            offloaded_step(optimizer, [parallel], offload)
        return str(caught.value)

    said = LocalWorld(3, timeout_s=30.0).run(run)

    assert all("1 parameters that are not offloaded" in text for text in said)


def test_limits_that_only_one_rank_exceeds_are_met_on_every_rank() -> None:
    def run(world: Communicator) -> str:
        limit = 1000 if world.rank == 1 else None
        with pytest.raises(OffloadError) as caught:
            shared_out(offload_to_host(host_limit_bytes=limit), 1, world)
        return str(caught.value)

    said = LocalWorld(2, timeout_s=30.0).run(run)

    assert all("its limit is 1,000" in text for text in said)


def test_an_optimizer_of_whole_matrices_is_refused() -> None:
    offload = offload_to_host()
    parallel = shared_out(offload, 1)
    names = [name for name, p in parallel.module.named_parameters() if p.dim() == 2]
    whole = WholeMatrices(parallel, names, lambda params: torch.optim.Muon(params, lr=0.1))

    with pytest.raises(NotAvailableError, match="offload element-wise optimizers only"):
        offloaded_step(whole, [parallel], offload)


def test_an_optimizer_of_the_modules_parameters_is_refused() -> None:
    offload = offload_to_host()
    parallel = shared_out(offload, 1)
    optimizer = torch.optim.SGD(parallel.module.parameters(), lr=0.1)

    with pytest.raises(ShardingError, match="24 parameters that are not offloaded"):
        offloaded_step(optimizer, [parallel], offload)
    with pytest.raises(ShardingError, match="at least one model"):
        offloaded_step(optimizer, [], offload)


def test_parameters_that_come_later_are_not_left_out_in_silence() -> None:
    offload = offload_to_host()
    parallel = shared_out(offload, 1)
    optimizer = adamw(parallel)
    stepping = offloaded_step(optimizer, [parallel], offload)

    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "param_names": ["new"]})

    with pytest.raises(ShardingError, match="parameters were added"):
        stepping.step()


def test_weights_in_use_all_the_time_cannot_be_offloaded() -> None:
    with pytest.raises(ShardingError, match="kept whole at stage 2"):
        shared_out(offload_to_host(weights=True), 2)


def test_planning_leaves_the_optimizer_as_it_was() -> None:
    offload = Offload(states=HostMemory(), gradients=HostMemory())
    parallel = shared_out(offload, 1)
    optimizer = adamw(parallel)
    options = [dict(group) for group in optimizer.param_groups]

    offloaded_step(optimizer, [parallel], offload)

    assert len(optimizer.state) == 0
    assert [dict(group) for group in optimizer.param_groups] == options


def test_hooks_of_the_optimizer_do_not_hear_of_planning() -> None:
    offload = offload_to_host()
    parallel = shared_out(offload, 1)
    optimizer = adamw(parallel)
    heard: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))

    stepping = offloaded_step(optimizer, [parallel], offload)
    assert heard == []
    train(parallel, stepping, 1)

    assert set(heard) == {"before", "after"}


@pytest.mark.parametrize("mixed", ["weights", "gradients", "states"])
def test_stores_that_cannot_work_together_are_refused(mixed: str, tmp_path: Path) -> None:
    host, file = HostMemory(), FileStore(tmp_path)
    stores = {"states": host, "gradients": host, "weights": host, mixed: file}

    with pytest.raises(OffloadError, match="pass the same FileStore for all"):
        Offload(**stores)


def test_states_of_several_ranks_may_share_a_folder(tmp_path: Path) -> None:
    def run(world: Communicator) -> int:
        offload = offload_to_folder(tmp_path)
        parallel = shared_out(offload, 2, world)
        stepping = offloaded_step(adamw(parallel), [parallel], offload)
        train(parallel, stepping, 2)
        assert isinstance(offload.states, FileStore)
        return offload.states.file_bytes

    sizes = LocalWorld(2, timeout_s=30.0).run(run)

    assert all(size >= 16 * ELEMENTS // 2 for size in sizes)


def test_gathers_of_weights_that_are_fetched_begin_in_the_order_in_which_they_are_asked_for() -> (
    None
):
    turns, said = Turns(), []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self, timeout_s: float | None = None) -> None:
            said.append(f"wait {self.name}")

        def is_done(self, within_s: float = 0.0) -> bool:
            return True

    def begin(number: int) -> Noted:
        said.append(f"begin {number}")
        return Noted(f"gather {number}")

    gathers = [turns.ask(Noted(f"fetch {n}"), partial(begin, n)) for n in range(3)]
    assert said == ["wait fetch 0", "begin 0", "wait fetch 1", "begin 1"]
    assert [gather.is_done() for gather in gathers] == [True, True, False]
    gathers[0].wait()
    gathers[2].wait()

    assert said[4:] == ["wait gather 0", "wait fetch 2", "begin 2", "wait gather 2"]


def test_what_is_in_a_file_takes_no_memory(tmp_path: Path) -> None:
    offload = offload_to_folder(tmp_path)
    parallel = shared_out(offload, 1)
    optimizer = adamw(parallel)
    train(parallel, offloaded_step(optimizer, [parallel], offload), 1)
    store = offload.states
    assert isinstance(store, FileStore)

    for piece in parallel.pieces.values():
        assert store.holds(piece.parameter)
        assert store.holds(optimizer.state[piece.parameter]["exp_avg"])
    assert not any(store.holds(parameter) for parameter in parallel.module.parameters())


@pytest.mark.parametrize(
    "slow", [{"link_bytes_s": 2e6}, {"file_bytes_s": 2e7}], ids=["link", "file"]
)
def test_what_is_on_a_slow_way_is_not_overwritten(slow: dict[str, float], tmp_path: Path) -> None:
    assert_alike(offload_to_folder(tmp_path, **slow))


def test_memory_is_not_used_again_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = FileStore._write

    def late(store: FileStore, start: int, source: torch.Tensor) -> None:
        time.sleep(0.02)
        usual(store, start, source)

    monkeypatch.setattr(FileStore, "_write", late)

    assert_alike(offload_to_folder(tmp_path))


def assert_alike(offload: Offload) -> None:
    pairs = zip(trained(offload), trained(None), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def trained(offload: Offload | None) -> list[torch.Tensor]:
    """Return weights, masters and moments after three steps."""
    parallel = shared_out(offload, 2)
    optimizer = adamw(parallel)
    stepping: Any = optimizer
    if offload is not None:
        stepping = offloaded_step(optimizer, [parallel], offload)
    train(parallel, stepping, 3)
    moments = [optimizer.state[p.parameter]["exp_avg"] for p in parallel.pieces.values()]
    kept = [piece.parameter for piece in parallel.pieces.values()]
    return [t.detach() for t in (*parallel.module.parameters(), *kept, *moments)]
