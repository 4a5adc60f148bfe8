"""What ranks hold where, while a model trains whose states exceed what its device may hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tools.bench.offload.measure import Sizes, make_run
from trainwright.sharding.offload import Offload, offload_to_folder, offload_to_host

BYTES_OF_STATES = 18
"""Of an element: weight and gradient, in 16 and 32 bits, master, two moments."""

MIB = 2**20
STEPS = 3

Make = Callable[[str, int], Offload]
MODES: Mapping[str, tuple[int, Make]] = {
    "optimizer, stage 2": (2, lambda _, most: offload_to_host(device_limit_bytes=most)),
    "parameters, stage 3": (
        3,
        lambda _, most: offload_to_host(weights=True, device_limit_bytes=most),
    ),
    "nvme:DIR, stage 2": (
        2,
        lambda folder, most: offload_to_folder(folder, device_limit_bytes=most),
    ),
    "nvme:DIR, stage 3": (
        3,
        lambda folder, most: offload_to_folder(folder, weights=True, device_limit_bytes=most),
    ),
}


def table(sizes: Sizes, folder: str) -> str:
    """Train in each mode; return a Markdown table of the most that ledgers counted, in MiB.

    Raises:
        OffloadError: The device would hold more than it may.
    """
    numel = sizes.layers * (sizes.width + 1) * sizes.width
    limit = BYTES_OF_STATES * numel // 4
    lines = [
        f"| of {_mib(BYTES_OF_STATES * numel)} MiB of model states | device, at most "
        f"{_mib(limit)} | host memory | three units |",
        "|---|---:|---:|---:|",
    ]
    for name, (stage, make) in MODES.items():
        offload = make(folder, limit)
        run = make_run(sizes, offload, stage=stage)
        for _ in range(STEPS):
            run.step()
        unit = getattr(run.stepping, "unit_bytes", 0)
        held = (offload.device.peak_bytes, offload.states.ledger.peak_bytes, 3 * unit)
        lines.append(f"| {name} | {' | '.join(_mib(each) if each else '' for each in held)} |")
        assert not list(Path(folder).iterdir()), "a file has no name"
    return "\n".join(lines)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f}"
