"""Contestants of the offload benchmark, timed in turn in one process of one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn

from trainwright.collectives import SingleCommunicator
from trainwright.sharding import Mesh, MeshShape
from trainwright.sharding.data import (
    DataParallel,
    ShardPolicy,
    by_class,
    data_parallel,
    offloaded_step,
    parameter_groups,
)
from trainwright.sharding.offload import (
    FileStore,
    Offload,
    OffloadedStep,
    Pace,
    offload_to_folder,
    offload_to_host,
)

MOST_LINK = 1.1
MOST_FILE = 1.15
MOST_UPDATE = 1.0


@attrs.frozen
class Sizes:
    """Of the model and its batch: square layers in bfloat16, masters and moments in float32."""

    layers: int
    width: int
    tokens: int


@attrs.define(eq=False)
class Run:
    """A model with its optimizer, and how it is stepped."""

    parallel: DataParallel
    stepping: torch.optim.Optimizer | OffloadedStep
    inputs: torch.Tensor
    offload: Offload | None = None

    def compute(self) -> None:
        """Forward and backward, until all gradients are where the update reads them."""
        self.parallel.zero_grad()
        self.parallel.last_backward()
        self.parallel.module(self.inputs).sum().backward()
        self.parallel.reduce()
        self.parallel.wait()

    def update(self) -> None:
        """Update the states."""
        self.stepping.step()

    def publish(self) -> None:
        """Make the module's weights of them."""
        self.parallel.publish()

    def step(self) -> None:
        """All of it."""
        self.compute()
        self.update()
        self.publish()


def make_run(sizes: Sizes, offload: Offload | None, *, stage: int = 2) -> Run:
    """Return a run whose states are on the device, or away."""
    generator = torch.Generator().manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(sizes.layers):
        layer = nn.Linear(sizes.width, sizes.width)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) / 32)
        layers += [layer, nn.Tanh()]
    model = nn.Sequential(*layers)
    policy = ShardPolicy(
        stage=stage,
        units=by_class(nn.Linear),
        bucket_bytes=6 * sizes.width**2,
        reduce_dtype=torch.bfloat16,
        parameter_dtype=lambda name, parameter: torch.bfloat16,
    )
    parallel = data_parallel(
        model, Mesh(SingleCommunicator(), MeshShape()), policy, offload=offload
    )
    groups = parameter_groups(parallel, list(model.parameters()))
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    inputs = torch.randn(sizes.tokens, sizes.width, generator=generator).bfloat16()
    if offload is None:
        return Run(parallel, optimizer, inputs)
    return Run(parallel, offloaded_step(optimizer, [parallel], offload), inputs, offload)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(sizes: Sizes, rounds: int, folder: str) -> list[dict[str, Any]]:
    """Time every contestant in each round; return rows with the ratios of the rounds."""
    torch.set_num_threads(1)
    plain = make_run(sizes, None)
    host, file = make_run(sizes, offload_to_host()), make_run(sizes, offload_to_folder(folder))
    for run in (plain, host, file):
        run.step()
        run.step()
    compute_s = statistics.median(timed(plain.compute) for _ in range(3))
    update_s = statistics.median(timed(plain.update) for _ in range(3))
    plain.publish()
    file.compute()
    # What the file takes as it is; slower ones are made of it.
    real_s = timed(file.update)
    file.publish()
    slow_s = 10 * max(real_s, update_s)
    rows = {
        "update in host memory": _row("AdamW(fused=True) and rounding", MOST_UPDATE),
        "step, link six times as slow as computing": _row(_LINK, MOST_LINK),
        "step, link as fast as computing": _row(_LINK, None),
        "step, link twenty times as fast as computing": _row(_LINK, MOST_LINK),
        "update, file ten times as slow": _row("max(I/O, update)", MOST_FILE),
        "step, file ten times as slow as the rest": _row("max(I/O, step)", MOST_FILE),
    }
    for _ in range(rounds):
        base = {"compute": timed(plain.compute)}
        base["update"] = timed(plain.update)
        base["publish"] = timed(plain.publish)
        host.compute()
        _add(rows["update in host memory"], timed(host.update), base["update"] + base["publish"])
        host.publish()
        links = (6.0, 1.0, 0.05)
        for name, slower in zip(_names(rows, "step, link"), links, strict=True):
            _add(rows[name], *_over_link(host, base, slower * compute_s))
        (update_name,) = _names(rows, "update, file")
        _add(rows[update_name], *_in_file(file, base["update"], slow_s, whole=False))
        (step_name,) = _names(rows, "step, file")
        rest = sum(base.values())
        _add(rows[step_name], *_in_file(file, rest, 10 * (compute_s + real_s), whole=True))
    for name, row in rows.items():
        row["name"] = name
        median = statistics.median(row["ratios"])
        row["met"] = None if row["most"] is None else median <= row["most"]
    return list(rows.values())


_LINK = "max(compute, transfer + update)"


def _row(against: str, most: float | None) -> dict[str, Any]:
    return {"against": against, "most": most, "ratios": [], "seconds": []}


def _add(row: dict[str, Any], seconds: float, least: float) -> None:
    row["seconds"].append(seconds)
    row["ratios"].append(seconds / least)


def _names(rows: dict[str, Any], start: str) -> list[str]:
    return [name for name in rows if name.startswith(start)]


def _over_link(run: Run, base: dict[str, float], transfer_s: float) -> tuple[float, float]:
    """Return the seconds of a step over a link on which all moves take ``transfer_s``, and what
    they could be at least."""
    assert run.offload is not None
    lanes = (run.offload.to_host, run.offload.to_device)
    moved = sum(lane.moved_bytes for lane in lanes)
    run.step()
    moved = sum(lane.moved_bytes for lane in lanes) - moved
    for lane in lanes:
        lane.pace = Pace(moved / transfer_s)
    seconds = timed(run.step)
    for lane in lanes:
        lane.pace = Pace()
    return seconds, max(base["compute"], transfer_s + base["update"])


def _in_file(run: Run, other: float, io_s: float, *, whole: bool) -> tuple[float, float]:
    """Return the seconds of an update, or a step, whose reads and writes take ``io_s``."""
    assert run.offload is not None
    store = run.offload.states
    assert isinstance(store, FileStore)
    lanes = (store.reads, store.writes)
    run.compute()
    moved = sum(lane.moved_bytes for lane in lanes)
    run.update()
    moved = sum(lane.moved_bytes for lane in lanes) - moved
    run.publish()
    pace = Pace(moved / io_s)
    if not whole:
        run.compute()
    for lane in lanes:
        lane.pace = pace
    seconds = timed(run.step if whole else run.update)
    for lane in lanes:
        lane.pace = Pace()
    if not whole:
        run.publish()
    return seconds, max(io_s, other)
