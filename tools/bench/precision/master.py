"""Time a step of master weights against PyTorch's AdamW on float32 weights.

``python -m tools.bench.precision.master --help``
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tools.bench import machine
from tools.bench.rounds import Spread, interleave, ratios
from tools.bench.table import format_table
from trainwright.precision import MasterWeights

TARGETS = {"fused": 1.7, "for-loop": 0.6}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Step = Callable[[], object]


def main(words: list[str]) -> int:
    """Run what the command line asks for; return the exit code, 1 if weights differ."""
    chosen = parse(words)
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    torch.set_num_threads(chosen.threads)
    dtype, shapes = DTYPES[chosen.dtype], shapes_of(chosen.width, chosen.layers)
    if not agrees(shapes, dtype):
        print("the masters are not what AdamW makes of float32 weights", file=sys.stderr)
        return 1
    seconds = race(shapes, dtype, chosen.rounds)
    if chosen.json:
        print(json.dumps(seconds, indent=1))
    else:
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        print(f"{machine.describe()}; {chosen.threads} threads; {numel / 1e6:.1f} M weights")
        print(describe(seconds))
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.precision.master")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print seconds as data")
    chosen = parser.parse_args(words)
    if min(chosen.width, chosen.layers, chosen.rounds, chosen.threads) < 1:
        parser.error("sizes and counts must be at least 1")
    return chosen


def shapes_of(width: int, layers: int) -> list[tuple[int, ...]]:
    """Return the weights of a plain decoder: an embedding, and matrices and norms of its layers."""
    layer = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    norms = [(width,), (width,)]
    return [(4096, width), *(shape for _ in range(layers) for shape in (*layer, *norms))]


def weights_of(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    """Return drawn weights, rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(weight.to(dtype)) for weight in drawn]


def masters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> MasterWeights:
    """Return 16-bit weights under a fused AdamW of masters."""
    named = [(f"w{number}", weight) for number, weight in enumerate(weights_of(shapes, dtype))]
    return MasterWeights(named, functools.partial(torch.optim.AdamW, lr=1e-3, fused=True))


def gradients_of(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return drawn gradients of ``dtype``."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def agrees(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> bool:
    """Whether masters after three steps are float32 weights under AdamW, bit for bit."""
    ours = masters(shapes, dtype)
    plain = [nn.Parameter(weight.detach().float()) for weight in weights_of(shapes, dtype)]
    oracle = torch.optim.AdamW(plain, lr=1e-3, fused=True)
    for _ in range(3):
        ours_weights = [weight for group in ours.param_groups for weight in group["params"]]
        for weight, other, gradient in zip(
            ours_weights, plain, gradients_of(shapes, dtype), strict=True
        ):
            weight.grad = gradient.float()
            other.grad = gradient.float()
        ours.step()
        oracle.step()
    found = ours.state_dict()["masters"].values()
    return all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def race(shapes: list[tuple[int, ...]], dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Time the steps in turn; ours with and without casting 16-bit gradients up."""
    gradients = gradients_of(shapes, dtype)
    contestants = {
        "fused": _plain(shapes, fused=True),
        "for-loop": _plain(shapes, foreach=False),
        "ours": _ours(shapes, dtype, None),
        "ours, gradients cast": _ours(shapes, dtype, gradients),
    }
    gc.collect()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for order in interleave(list(contestants), rounds):
        for name in order:
            contestants[name]()
            start = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _plain(shapes: list[tuple[int, ...]], **kind: Any) -> Step:
    weights = weights_of(shapes, torch.float32)
    for weight in weights:
        weight.grad = torch.randn(weight.shape)
    return torch.optim.AdamW(weights, lr=1e-3, **kind).step


def _ours(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, gradients: list[torch.Tensor] | None
) -> Step:
    optimizer = masters(shapes, dtype)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for weight in weights:
        weight.grad = torch.randn(weight.shape)

    def step() -> None:
        # As autograd does it when it adds a 16-bit gradient to a float32 one that is there.
        if gradients is not None:
            torch._foreach_copy_([weight.grad for weight in weights], gradients)
        optimizer.step()

    return step


def describe(seconds: dict[str, list[float]]) -> str:
    """Return the table and the targets."""
    rows = []
    for name, times in seconds.items():
        spreads = [ratios(times, seconds[peer]).format() for peer in TARGETS]
        rows.append([name, f"{1e3 * Spread.of(times).median:.1f}", *spreads])
    lines = [format_table(["AdamW", "ms", *(f"/ {peer}" for peer in TARGETS)], rows)]
    for peer, target in TARGETS.items():
        found = ratios(seconds["ours"], seconds[peer]).median
        verdict = "met" if found <= target else "MISSED"
        lines.append(f"ours / {peer} at most {target}: {found:.2f} {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
