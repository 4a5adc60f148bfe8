"""Time block quantisation against the plain expression.

``python -m tools.bench.precision.blocks --help``
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable

import attrs
import torch

from tools.bench import machine
from tools.bench.rounds import Spread, interleave, ratios
from tools.bench.table import format_table
from tools.bench.tensor_memory import watch
from trainwright.precision.formats import (
    E4M3,
    BlockQuantized,
    floor_exponent,
    quantize_blockwise,
    quantize_mx,
)

TARGET = 0.5
SCRATCH_MIB = 8.0
Block = tuple[int, int]
BLOCKS: dict[str, Block] = {"1x128": (1, 128), "128x128": (128, 128), "mx32": (1, 32)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@attrs.frozen
class Race:
    """What one kind of block cost.

    Args:
        name: block and dtype.
        seconds: contestant to its seconds in each round.
        least_bytes: what has to be read and written.
        moved_by_copy: what the copy reads and writes.
        scratch: contestant to the most bytes that it held beside its results. What is small stays
            in the caches: then the tensor is read once and the codes are written once.
    """

    name: str
    seconds: dict[str, list[float]]
    least_bytes: int
    moved_by_copy: int
    scratch: dict[str, int]

    def to_naive(self) -> Spread:
        """Return our time over the plain expression's."""
        return ratios(self.seconds["ours"], self.seconds["naive"])

    def share_of_copy(self) -> Spread:
        """Return the bytes a second that had to be moved, over those of a copy."""
        rate = self.least_bytes / self.moved_by_copy
        pairs = zip(self.seconds["copy"], self.seconds["ours"], strict=True)
        return Spread.of([rate * copy / ours for copy, ours in pairs])


def main(words: list[str]) -> int:
    """Run what the command line asks for; return the exit code, 1 if codes differ."""
    chosen = parse(words)
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    torch.set_num_threads(chosen.threads)
    races = []
    for kind in chosen.blocks:
        tensor = torch.randn(chosen.rows, chosen.cols).to(DTYPES[chosen.dtype])
        wrong = difference(kind, tensor)
        if wrong > 0.01:
            print(f"{kind}: {wrong:.1%} of the codes differ", file=sys.stderr)
            return 1
        races.append(race(kind, tensor, chosen.rounds))
    if chosen.json:
        print(json.dumps([attrs.asdict(found) for found in races], indent=1))
    else:
        print(f"{machine.describe()}; {chosen.threads} threads")
        print(describe(races))
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.precision.blocks")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096, help="multiples of 128, as the rows")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--blocks", nargs="+", choices=list(BLOCKS), default=list(BLOCKS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print seconds and bytes as data")
    chosen = parser.parse_args(words)
    if min(chosen.rows, chosen.cols, chosen.rounds, chosen.threads) < 1:
        parser.error("sizes and counts must be at least 1")
    if chosen.rows % 128 or chosen.cols % 128:
        parser.error("--rows and --cols must be multiples of 128")
    return chosen


def race(kind: str, tensor: torch.Tensor, rounds: int) -> Race:
    """Time a copy, the plain expression and ours in turn."""
    target = torch.empty_like(tensor)
    contestants: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(tensor),
        "naive": lambda: naive(kind, tensor),
        "ours": lambda: ours(kind, tensor),
    }
    gc.collect()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for order in interleave(list(contestants), rounds):
        for name in order:
            contestants[name]()
            start = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - start)
    held = tensor.numel() * tensor.itemsize
    results = tensor.numel()
    scratch = {name: watch(contestants[name]) for name in ("naive", "ours")}
    return Race(
        f"{kind} {str(tensor.dtype).removeprefix('torch.')}",
        seconds,
        held + tensor.numel(),
        2 * held,
        {name: seen.peak - seen.lasting - results for name, seen in scratch.items()},
    )


def ours(kind: str, tensor: torch.Tensor) -> BlockQuantized:
    """Quantise as the package does."""
    if kind == "mx32":
        return quantize_mx(tensor, E4M3, floor_exponent)
    return quantize_blockwise(tensor, BLOCKS[kind], E4M3)


def naive(kind: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise by whole-tensor expressions, as one writes them down."""
    rows, cols = BLOCKS[kind]
    blocks = tensor.view(tensor.shape[0] // rows, rows, tensor.shape[1] // cols, cols).float()
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-12)
    if kind == "mx32":
        scale = torch.exp2(amax.log2().floor() - E4M3.emax)
    else:
        scale = amax / E4M3.max
    codes = (blocks / scale).clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)
    return codes.view(tensor.shape), scale


def difference(kind: str, tensor: torch.Tensor) -> float:
    """Return the part of the codes that differ; those at ties may, by one."""
    found = ours(kind, tensor).codes
    expected = naive(kind, tensor)[0].view(torch.uint8)
    apart = (found.short() - expected.short()).abs()
    return 1.0 if apart.max() > 1 else float((apart > 0).double().mean())


def describe(races: list[Race]) -> str:
    """Return the table and the targets."""
    head = ["", "copy ms", "naive ms", "ours ms", "ours/naive", "share of copy", "scratch MiB"]
    rows = []
    for found in races:
        times = [Spread.of(found.seconds[name]) for name in ("copy", "naive", "ours")]
        milliseconds = [f"{1e3 * spread.median:.1f}" for spread in times]
        spreads = [found.to_naive().format(), found.share_of_copy().format()]
        held = [f"{found.scratch[name] / 2**20:.1f}" for name in ("naive", "ours")]
        rows.append([found.name, *milliseconds, *spreads, " / ".join(held)])
    worst = max(found.to_naive().median for found in races)
    most = max(found.scratch["ours"] for found in races) / 2**20
    return "\n".join(
        [
            format_table(head, rows),
            f"ours/naive at most {TARGET}: {worst:.2f} {'met' if worst <= TARGET else 'MISSED'}",
            f"scratch at most {SCRATCH_MIB} MiB, so that memory is passed once for the tensor and "
            f"once for the codes: {most:.1f} {'met' if most <= SCRATCH_MIB else 'MISSED'}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
