"""What accelerators can do at most: the denominators of MFU and HFU."""

from __future__ import annotations

import difflib
import re

import attrs
import torch

from trainwright.integration.errors import ConfigError

PEAK_OF_DTYPE = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "fp8-delayed": "fp8",
    "fp8-current": "fp8",
    "fp8-row": "fp8",
    "fp8-block": "fp8",
    "fp8-mx": "fp8",
}
"""For each dtype of a run, the products that it makes most of; float64 has no peak here.

Products of float32 are not those of TF32, which PyTorch makes only where it is asked to.
"""


@attrs.frozen
class Device:
    """One accelerator, as PyTorch sees it.

    Peaks are of dense products in TFLOP/s, None where the device has none of that kind; advertised
    ones are often twice as much, for sparse matrices.

    Args:
        name: what it is called.
        pattern: what `torch.cuda.get_device_name` says, as a regular expression for all of it.
        memory_gb: of the device as its vendor says, GB of 1e9 bytes; what PyTorch finds is up to
            a fifteenth more, and what context and communicators take goes off it.
        bandwidth_tb_s: of that memory.
        fp32, tf32, fp16, bf16, fp8: TFLOP/s.
    """

    name: str
    pattern: str
    memory_gb: float
    bandwidth_tb_s: float
    fp32: float
    tf32: float | None
    fp16: float
    bf16: float | None
    fp8: float | None = None

    def peak(self, dtype: str) -> float | None:
        """Return the FLOP/s of a run in ``dtype``; None where that is not known."""
        kind = PEAK_OF_DTYPE.get(dtype)
        tera: float | None = None if kind is None else getattr(self, kind)
        return None if tera is None else tera * 1e12


DEVICES = (
    Device("GB300", r"NVIDIA GB300.*", 288, 8.0, 80.0, 1250.0, 2500, 2500, 5000),
    Device("GB200", r"NVIDIA GB200.*", 186, 8.0, 80.0, 1250.0, 2500, 2500, 5000),
    Device("B300", r"NVIDIA B300.*", 288, 8.0, 80.0, 1125.0, 2250, 2250, 4500),
    Device("B200", r"NVIDIA B200.*", 180, 8.0, 80.0, 1125.0, 2250, 2250, 4500),
    Device("GH200", r"NVIDIA GH200 480GB", 96, 4.0, 67.0, 494.5, 989, 989, 1979),
    Device("GH200 144 GB", r"NVIDIA GH200 144G.*", 141, 4.8, 67.0, 494.5, 989, 989, 1979),
    Device("H200 SXM", r"NVIDIA H200", 141, 4.8, 67.0, 494.5, 989, 989, 1979),
    Device("H100 SXM", r"NVIDIA H100 80GB HBM3", 80, 3.35, 67.0, 494.5, 989, 989, 1979),
    Device("H100 PCIe", r"NVIDIA H100 PCIe", 80, 2.0, 51.0, 378.0, 756, 756, 1513),
    Device("A100 SXM 80 GB", r"(NVIDIA )?A100-SXM.*80GB", 80, 2.0, 19.5, 156.0, 312, 312),
    Device("A100 SXM 40 GB", r"(NVIDIA )?A100-SXM.*40GB", 40, 1.555, 19.5, 156.0, 312, 312),
    Device("A100 PCIe", r"(NVIDIA )?A100 80GB PCIe", 80, 1.94, 19.5, 156.0, 312, 312),
    Device("L40S", r"NVIDIA L40S", 48, 0.86, 91.6, 183.0, 362, 362, 733),
    Device("V100 32 GB", r"Tesla V100-SXM\d-32GB.*", 32, 0.9, 15.7, None, 125, None),
    Device("MI355X", r"AMD Instinct MI355X.*", 288, 8.0, 157.3, None, 2500, 2500, 5000),
    Device("MI325X", r"AMD Instinct MI325X.*", 256, 6.0, 163.4, 653.7, 1300, 1300, 2610),
    Device("MI300X", r"AMD Instinct MI300X.*", 192, 5.3, 163.4, 653.7, 1300, 1300, 2610),
)
"""Those whose names are known; a device of two dies that PyTorch sees as two is not among them.

Source: vendors' specifications as collected in S. Bekman, Machine Learning Engineering,
compute/accelerator (https://github.com/stas00/ml-engineering), dense rates of an unthrottled
clock; V100 and A100 40 GB from NVIDIA's data sheets.
"""


def find_device(name: str) -> Device | None:
    """Return the device that PyTorch calls ``name``; None where it is not in the table."""
    return next((d for d in DEVICES if re.fullmatch(d.pattern, name)), None)


def named_device(name: str) -> Device:
    """Return the first device whose name begins so, or that PyTorch calls so.

    Raises:
        ConfigError: there is none; the nearest is offered.
    """
    wanted = _plain(name)
    for device in DEVICES:
        if wanted and _plain(device.name).startswith(wanted):
            return device
    found = find_device(name)
    if found is not None:
        return found
    near = difflib.get_close_matches(wanted, [_plain(d.name) for d in DEVICES], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    known = ", ".join(device.name for device in DEVICES)
    raise ConfigError(f"unknown device {name!r}; known are {known}{hint}")


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).lower()


def device_of(device: torch.device) -> Device | None:
    """Return what a tensor's device is; None on a CPU, whose peak nobody has measured here."""
    if device.type != "cuda":
        return None
    return find_device(torch.cuda.get_device_name(device))
