"""What a benchmark ran on, and whether the machine had anything else to do."""

from __future__ import annotations

import os
import platform

import torch

_IDLE = 0.5


def describe() -> str:
    """Return one line on the processor, the cores and the versions."""
    cores = len(os.sched_getaffinity(0))
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{_processor()}, {cores} cores, {versions}"


def warning() -> str:
    """Return what to tell the reader if other work ran in the last minute, else ""."""
    load = os.getloadavg()[0]
    if load <= _IDLE:
        return ""
    return (
        f"load {load:.1f} before the run: the machine is not idle, "
        "so neither times nor ratios mean anything"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()
