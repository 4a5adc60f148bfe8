"""Print what collectives cost: ``python -m tools.bench.collectives_cost --help``.

Without ``--sweeps`` a line a size with the microseconds of each algorithm on a preset and the best
of them; with it, how well constants fitted to some of the sweeps of a file tell the others of the
same fabric, as the tests of trainwright-collectives demand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.collectives.algorithm_phases import ALGORITHMS
from trainwright.collectives.cost import format_costs
from trainwright.collectives.sweeps import Measurement, Route, fit
from trainwright.collectives.topology import PRESETS, preset

SWEEPS = Path(__file__).parents[2] / "packages/collectives/tests/published_sweeps.json"
MIB = 1 << 20


def main(words: list[str]) -> int:
    """Print what the command line asks for; return the exit code."""
    chosen = parse(words)
    if chosen.sweeps is not None:
        print(describe_fits(json.loads(chosen.sweeps.read_text())["sweeps"]))
        return 0
    topology = preset(chosen.preset, chosen.nodes, chosen.devices, rings=chosen.rings)
    print(f"{chosen.collective} of {topology.size} ranks, {chosen.preset}")
    print(format_costs(chosen.collective, [8 * 4**power for power in range(15)], topology))
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.collectives_cost")
    parser.add_argument("--collective", choices=list(ALGORITHMS), default="all_reduce")
    parser.add_argument("--preset", choices=list(PRESETS), default="h100")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=8, help="a node; default: 8")
    parser.add_argument("--rings", type=int, default=1, help="8 is what NCCL does on 8 devices")
    parser.add_argument(
        "--sweeps",
        type=Path,
        nargs="?",
        const=SWEEPS,
        help="fit the sweeps of a file, by default those of the package's tests",
    )
    return parser.parse_args(words)


def describe_fits(sweeps: list[Mapping[str, Any]]) -> str:
    """Return a table for each sweep of more than one point: the others of its fabric, as told."""
    texts = []
    for known in sweeps:
        points = _points(known)
        others = [
            point
            for other in sweeps
            if other["fabric"] == known["fabric"] and other is not known
            for point in _points(other)
        ]
        if len(points) < 3:
            continue
        # Every second point tells those between, where there is nothing else to tell.
        fabric = fit(points if others else points[::2], Route(known["route"]))
        told = others or points[1::2]
        texts.append(
            f"{known['fabric']}, from {known['name']}: {fabric.latency_s * 1e6:.2f} us a step, "
            f"{fabric.bytes_per_s / 1e9:.0f} GB/s\n{fabric.format_errors(told)}"
        )
    return "\n\n".join(texts)


def _points(sweep: Mapping[str, Any]) -> list[Measurement]:
    return [
        Measurement.of_bus_bandwidth(sweep["collective"], sweep["ranks"], num_bytes, busbw * 1e9)
        for num_bytes, busbw in sweep["points"]
        if num_bytes >= MIB
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
