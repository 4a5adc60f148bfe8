"""What is measured of the ranks every so many steps: their times, their memory, the pipeline."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainwright.collectives import Communicator, ReduceOp, all_gather_object
from trainwright.integration.memory_kinds import peak_bytes, state_bytes
from trainwright.integration.parts import Parts, Progress
from trainwright.integration.recipe import StepRecord
from trainwright.pipeline_schedules.execute import StepResult, Timed

MOST_RANKS = 64
"""So many ranks are asked, evenly spread; the slowest is found among all there are."""
MOST_OPERATIONS = 2000
"""Of a rank's timeline so many operations are kept."""
COMPUTATIONS = ("F", "B", "I", "W")
_RANK_BITS = 24


class RankMeasures:
    """Observes the steps; at measured ones every rank tells what it did and holds.

    Args:
        parts: of this rank.
        progress: how far the run has come.
        write: takes what was measured, as plain data, on the first rank.

    Communicates: at first a split of the world, where it is larger than `MOST_RANKS`. At a
    measured step one int64 all-reduce over the world, an all-gather of about 300 bytes a rank over
    those that are asked and, where the timeline is kept, of the pipeline's timelines over the first
    pipeline.
    """

    def __init__(
        self, parts: Parts, progress: Progress, write: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._parts = parts
        self._progress = progress
        self._write = write
        self._asked = _spread(parts.mesh.world)
        self._states: dict[str, int] = {}
        # Gradients are there when the update begins and gone when observers are called.
        self._hook = parts.optimizer.register_step_pre_hook(self._count)

    def __call__(self, record: StepRecord) -> None:
        """Measure if the step is due."""
        result, parts = record.pipeline, self._parts
        if result is None or result.timeline is None or not parts.is_measured(record.step):
            return
        world = parts.mesh.world
        compute = compute_seconds(result.timeline)
        row: dict[str, Any] = {
            "step": record.step,
            "world": world.size,
            "layout": parts.config.parallel.layout,
            "microbatches": record.microbatches,
            "slowest": _slowest(world, compute),
        }
        if self._asked is not None:
            row |= _columns(_gather(self._asked, self._mine(record, result.timeline, compute)))
        watching = parts.config.watching
        is_kept = watching.keeps_timeline(record.step, parts.steps, record.end)
        if 0 in parts.mesh.ranks("pp") and is_kept:
            row["timeline"] = _timeline(parts.mesh.communicator("pp"), result)
        self._states = {}
        if world.rank == 0:
            self._write(row)

    def close(self) -> None:
        """Leave the optimizer as it was."""
        self._hook.remove()

    def _count(self, *_: object) -> None:
        parts = self._parts
        if parts.is_measured(self._progress.step + 1):
            model = parts.model
            self._states = state_bytes(
                model.stages.values(),
                model.pieces,
                parts.optimizer,
                model.is_in_file,
                model.parallel.values(),
            )

    def _mine(
        self, record: StepRecord, timeline: tuple[Timed, ...], compute: float
    ) -> dict[str, Any]:
        device = self._parts.mesh.world.device
        waits = sum(t.stop_s - t.start_s for t in timeline if t.operation.startswith("wait"))
        return {
            "rank": self._parts.mesh.world.rank,
            "step_s": round(record.seconds, 6),
            "compute_s": round(compute, 6),
            "wait_s": round(waits, 6),
            "states": self._states,
            "peak": peak_bytes(device),
            "device": device.type,
            "process": f"{socket.gethostname()}:{os.getpid()}",
        }


def compute_seconds(timeline: tuple[Timed, ...]) -> float:
    """Return how long a rank computed in a step."""
    return sum(t.stop_s - t.start_s for t in timeline if t.operation in COMPUTATIONS)


def _spread(world: Communicator) -> Communicator | None:
    """Return what joins the ranks that are asked; None on the others."""
    if world.size <= MOST_RANKS:
        return world
    last = world.size - 1
    chosen = {round(place * last / (MOST_RANKS - 1)) for place in range(MOST_RANKS)}
    return world.split(0 if world.rank in chosen else None, key=world.rank)


def _slowest(world: Communicator, compute: float) -> dict[str, float]:
    """Return the rank that computed longest and how long; the same on every rank."""
    packed = min(int(compute * 1e6), 2 ** (62 - _RANK_BITS)) << _RANK_BITS | world.rank
    most = torch.tensor([packed], dtype=torch.int64, device=world.device)
    world.all_reduce(most, ReduceOp.MAX).wait()
    found = int(most)
    return {"rank": found & (2**_RANK_BITS - 1), "compute_s": (found >> _RANK_BITS) / 1e6}


def _columns(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what ranks told, by name, with the memory by kind."""
    names = ("rank", "step_s", "compute_s", "wait_s")
    columns = {name: [each[name] for each in told] for name in names}
    columns["ranks"] = columns.pop("rank")
    if not all(each["states"] for each in told):
        return columns  # the step's update was skipped
    kinds = list(told[0]["states"])
    memory = {kind: [each["states"].get(kind, 0) for each in told] for kind in kinds}
    held = [sum(each["states"].values()) for each in told]
    peaks = [each["peak"] for each in told]
    if len({each["process"] for each in told}) == len(told):
        memory["rest"] = [max(0, peak - own) for peak, own in zip(peaks, held, strict=True)]
        whose = "of the device" if told[0]["device"] == "cuda" else "of the process, in host memory"
        note = f"Counted before an update; with the rest it is the peak {whose}."
    else:
        note = f"Counted before an update; ranks are threads, whose peak is {max(peaks):,} bytes."
    return {**columns, "memory": memory, "memory_note": note}


def _timeline(pipeline: Communicator, result: StepResult) -> list[list[list[Any]]]:
    """Return what takes each rank's time, on one clock; the same on every rank of the pipeline."""
    pipeline.barrier()
    mine = {
        "now_s": time.perf_counter(),
        "host": _host(),
        "lane": [
            [
                t.operation,
                t.stage,
                t.microbatch,
                round(result.began_s + t.start_s, 6),
                round(result.began_s + t.stop_s, 6),
            ]
            for t in result.timeline or ()
            if t.operation in COMPUTATIONS or t.operation.startswith("wait")
        ][:MOST_OPERATIONS],
    }
    told = _gather(pipeline, mine)
    lanes = []
    for each in told:
        # Processes of one host read one clock; those of others left the barrier at about one time.
        same = each["host"] == told[0]["host"]
        ahead = 0.0 if same else each["now_s"] - told[0]["now_s"]
        lanes.append(
            [[*place, start - ahead, stop - ahead] for *place, start, stop in each["lane"]]
        )
    return lanes


def _gather(ranks: Communicator, mine: dict[str, Any]) -> list[dict[str, Any]]:
    return all_gather_object(
        ranks, mine, encode=lambda value: json.dumps(value).encode(), decode=json.loads
    )


def _host() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
