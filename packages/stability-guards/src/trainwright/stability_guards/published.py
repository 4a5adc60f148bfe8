"""Hyper-parameters and stability measures of published runs, as data with their sources."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs

from trainwright.stability_guards.errors import GuardError
from trainwright.stability_guards.ramps import BatchRamp, fixed_batch, linear_ramp
from trainwright.stability_guards.schedules import Rates, linear, warmup_cosine

M, B = 10**6, 10**9


@attrs.frozen
class Hyperparameters:
    """What a run was trained with; None where its source does not say.

    Args:
        source: paper and section.
        peak: greatest learning rate.
        floor: last learning rate.
        betas: of Adam.
        eps: of Adam.
        clip: largest gradient norm.
        weight_decay: a constant; None too where it follows the learning rate.
        warmup_tokens: tokens of the rise.
        warmup_updates: updates of the rise, where the source counts it so.
        decay_tokens: tokens after which the rate has its floor, rise included.
        fall: the schedule of rise and fall.
        batch_tokens: tokens of a batch, once it is grown.
        first_batch_tokens: of the first batch, where it grows linearly.
        ramp_tokens: range of the tokens over which batches grow, by size of model.
        z_loss: coefficient of the z-loss.
    """

    source: str
    peak: float | None = None
    floor: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    clip: float | None = None
    weight_decay: float | None = None
    warmup_tokens: int | None = None
    warmup_updates: int | None = None
    decay_tokens: int | None = None
    fall: Callable[[float, int, int, float], Rates] = warmup_cosine
    batch_tokens: int | None = None
    first_batch_tokens: int | None = None
    ramp_tokens: tuple[int, int] | None = None
    z_loss: float | None = None

    def schedule(self, decay_tokens: int | None = None) -> Rates:
        """Return the learning rate by tokens; see `OverRamp` for one by updates.

        Args:
            decay_tokens: tokens of rise and fall where the source does not say or yours differ.

        Raises:
            GuardError: a number that it needs is not known.
        """
        total = self.decay_tokens if decay_tokens is None else decay_tokens
        peak, floor, warmup = self.peak, self.floor, self.warmup_tokens
        if warmup is None and self.warmup_updates is not None and self.batch_tokens is not None:
            warmup = self.warmup_updates * self.batch_tokens
        if peak is None or floor is None or warmup is None or total is None:
            raise GuardError(f"{self.source} does not say enough for a schedule: {self}")
        return self.fall(peak, warmup, total, floor)

    def ramp(self, multiple_of: int = 1, over: int | None = None) -> BatchRamp:
        """Return the batch sizes in tokens, rounded down to a multiple.

        Args:
            multiple_of: tokens of a sequence times data ranks times microbatches.
            over: tokens of the growth; None takes the end of the published range.

        Raises:
            GuardError: the batch is not known, or holds less than one multiple.
        """
        if self.batch_tokens is None:
            raise GuardError(f"{self.source} does not say how many tokens a batch has")
        last = self.batch_tokens // multiple_of * multiple_of
        if self.first_batch_tokens is None or self.ramp_tokens is None:
            return fixed_batch(last)
        first = self.first_batch_tokens // multiple_of * multiple_of
        length = self.ramp_tokens[1] if over is None else over
        return linear_ramp(first, last, length, multiple_of)


def _gpt3(peak: float, batch_tokens: int) -> Hyperparameters:
    return Hyperparameters(
        source="Brown et al. (2020), table 2.1 and appendix B",
        peak=peak,
        floor=peak * 0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        clip=1.0,
        weight_decay=0.1,
        warmup_tokens=375 * M,
        decay_tokens=260 * B,
        batch_tokens=batch_tokens,
        first_batch_tokens=32_000,
        ramp_tokens=(4 * B, 12 * B),
    )


PUBLISHED: Mapping[str, Hyperparameters] = MappingProxyType(
    {
        "common": Hyperparameters(
            source="What most decoder runs since GPT-3 share",
            betas=(0.9, 0.95),
            clip=1.0,
            weight_decay=0.1,
            warmup_updates=2000,
        ),
        "gpt3-125m": _gpt3(6e-4, M // 2),
        "gpt3-350m": _gpt3(3e-4, M // 2),
        "gpt3-760m": _gpt3(2.5e-4, M // 2),
        "gpt3-1.3b": _gpt3(2e-4, M),
        "gpt3-6.7b": _gpt3(1.2e-4, 2 * M),
        "gpt3-175b": _gpt3(6e-5, 32 * M // 10),
        "opt-175b": Hyperparameters(
            source="Zhang et al., OPT (2022), section 2.2, as begun",
            peak=1.2e-4,
            floor=1.2e-5,
            betas=(0.9, 0.95),
            clip=1.0,
            weight_decay=0.1,
            warmup_updates=2000,
            decay_tokens=300 * B,
            fall=linear,
            batch_tokens=2 * M,
        ),
        "palm-540b": Hyperparameters(
            source="Chowdhery et al., PaLM (2022), section 5; weight decay is `SquareOf` the rate",
            clip=1.0,
            z_loss=1e-4,
        ),
        "bloom-176b": Hyperparameters(
            source="BigScience, tr11-176B-ml (2022)",
            peak=6e-5,
            floor=6e-6,
            betas=(0.9, 0.95),
            clip=1.0,
            weight_decay=0.1,
            warmup_tokens=375 * M,
        ),
        "fms-7b": Hyperparameters(
            source="foundation-model-stack, fms-fsdp, training details (2024)",
            peak=3e-4,
            floor=3e-5,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            decay_tokens=2000 * B,
            batch_tokens=128 * 2 * 4096,
        ),
    }
)
"""Published runs by name."""

OPT_CLIPS = (2.5, 1.5, 1.0, 0.3)
"""Largest norms that OPT-175B was given one after the other, by its log book."""

OPT_WEIGHT_DECAYS = (0.05, 0.1)
"""Before and after a change in OPT-175B's log book."""

OPT_BETA2S = (0.98, 0.95)
"""Before and after a change in OPT-175B's log book."""

OPT_FIRST_RATES = (3e-4, 1e-5)
"""Peak and floor with which OPT-175B's log book begins."""

GLM_SHRINK = 0.1
"""Share of the embedding's gradient that GLM-130B let through."""

GLM_SHRINK_ENDS = (6000, 500)
"""Step from which, and steps within which, GLM-130B first raised that share to 1."""

GLM_CHECKPOINTS_EVERY = (500, 100)
"""Steps between GLM-130B's checkpoints, before and after it grew unstable."""

PALM_RESTART_BEFORE = 100
"""Steps before a spike at which PaLM restarted, about."""

PALM_SKIPPED = (200, 500)
"""Range of the batches around a spike that PaLM left out; of about 20 spikes in the run."""

LLAMA3_INTERRUPTIONS: Mapping[str, int] = MappingProxyType(
    {
        "Faulty GPU": 148,
        "GPU HBM3 Memory": 72,
        "Software Bug": 54,
        "Network Switch/Cable": 35,
        "Host Maintenance": 32,
        "GPU SRAM Memory": 19,
        "GPU System Processor": 17,
        "NIC": 7,
        "NCCL Watchdog Timeouts": 7,
        "Silent Data Corruption": 6,
        "GPU Thermal Interface + Sensor": 6,
        "SSD": 3,
        "Power Supply": 3,
        "Server Chassis": 2,
        "IO Expansion Board": 2,
        "Dependency": 2,
        "CPU": 2,
        "System Memory": 2,
    }
)
"""Unexpected interruptions by cause, 16,384 GPUs in 54 days: Llama 3 (2024), table 5.

The shares printed there are of all 419, but for the first, which they put at 30.1% instead of 35.3.
"""


def mean_time_between_failures(seconds: float, failures: int, gpus: int, of_gpus: int) -> float:
    """Return the seconds between interruptions of a job, from those of another one.

    Args:
        seconds: duration of the job that was watched.
        failures: interruptions in it.
        gpus: its size.
        of_gpus: size of the job asked about, each part of which fails as often.

    Raises:
        GuardError: a number is not positive.
    """
    if not (seconds > 0.0 and failures > 0 and gpus > 0 and of_gpus > 0):
        raise GuardError(
            f"all must be positive, got {seconds} s, {failures} failures, {gpus} and {of_gpus} GPUs"
        )
    return seconds / failures * gpus / of_gpus


def checkpoint_interval(write_s: float, failure_s: float) -> float:
    """Return the seconds between checkpoints that lose the least to writing and to failures.

    Args:
        write_s: seconds that a checkpoint holds training up.
        failure_s: mean seconds between failures.

    Raises:
        GuardError: a number is not positive.

    Source:
        Young (1974), first order: sqrt(2 * write * failure); near it where writing is much shorter
        than the time between failures.
    """
    if not (write_s > 0.0 and failure_s > 0.0):
        raise GuardError(f"both times must be positive, got {write_s} and {failure_s}")
    return math.sqrt(2.0 * write_s * failure_s)
