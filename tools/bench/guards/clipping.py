"""Clip many small tensors: ``python -m tools.bench.guards.clipping``, beside PyTorch's foreach."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tools.bench import machine
from tools.bench.table import format_table
from trainwright.stability_guards import (
    clip_,
    clip_grad_adaptive_,
    clip_grad_norm_,
    clip_grad_value_,
)

MOST = 1.1  # times PyTorch's
SHAPE = (16, 16)


def main(words: list[str]) -> int:
    """Time each way of clipping in turn; return the exit code, 1 if the target is missed."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.guards.clipping")
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print all as data")
    chosen = parser.parse_args(words)
    if min(chosen.tensors, chosen.rounds) < 1:
        parser.error("counts must be positive")
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    found = measure(chosen.tensors, chosen.rounds)
    if chosen.json:
        print(json.dumps(found, indent=1))
    else:
        print(machine.describe())
        print(describe(found))
    return 0 if found["met"] else 1


def measure(tensors: int, rounds: int) -> dict[str, Any]:
    """Return median seconds of each way, taken in turn so that all meet the same machine."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(SHAPE, generator=generator)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.randn(SHAPE, generator=generator)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    known = torch.tensor(2.0, dtype=torch.float64)
    ways: dict[str, Callable[[], object]] = {
        "torch clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(parameters, 1e9, foreach=True),
        "clip_grad_norm_": lambda: clip_grad_norm_(parameters, 1e9),
        "clip_ (norm known)": lambda: clip_(gradients, known, 1e9),
        "torch clip_grad_value_": lambda: nn.utils.clip_grad_value_(parameters, 1e9, foreach=True),
        "clip_grad_value_": lambda: clip_grad_value_(parameters, 1e9),
        "clip_grad_adaptive_": lambda: clip_grad_adaptive_(parameters, 1e9),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, clip in ways.items():
            began = time.perf_counter()
            clip()
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    # Each turn is a pair, so that what slows the machine slows both.
    pairs = zip(seconds["clip_grad_norm_"], seconds["torch clip_grad_norm_"], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    return {
        "tensors": tensors,
        "shape": SHAPE,
        "seconds": medians,
        "ratio": ratio,
        "met": ratio <= MOST,
    }


def describe(found: dict[str, Any]) -> str:
    """Return the times as text."""
    rows = [[name, f"{seconds * 1e3:.2f}"] for name, seconds in found["seconds"].items()]
    met = "met" if found["met"] else "MISSED"
    return "\n".join(
        [
            f"{found['tensors']:,} tensors of {found['shape']}, float32",
            format_table(["way", "ms"], rows),
            f"clip_grad_norm_ takes {found['ratio']:.3f} times PyTorch's, target at most {MOST}: "
            f"{met}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
