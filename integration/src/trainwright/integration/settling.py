"""From the words of a command line to the settings of a run, and back."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from trainwright.integration.config import SCALED, RunConfig
from trainwright.integration.data.learned import FILE as TOKENIZER
from trainwright.integration.deepspeed import read_deepspeed
from trainwright.integration.errors import ConfigError
from trainwright.integration.model import PRESETS
from trainwright.integration.run_folder import RunFolder
from trainwright.integration.settings.options import given_leaves, written
from trainwright.integration.settings.resolved import stretched
from trainwright.integration.values import option

TRANSPORTS = ("auto", "gloo", "shm", "threads")


def to_standard_error(note: str) -> None:
    """Tell a person something."""
    sys.stderr.write(f"{note}\n")


def settle(
    options: argparse.Namespace,
    tell: Callable[[str], None] = to_standard_error,
    *,
    decides: bool = True,
) -> tuple[RunConfig, str, bool]:
    """Return the settings, the run folder and whether a run is continued.

    The command line goes before a file of settings, and that before a run that is continued. A
    configuration of DeepSpeed must agree with both of the former.

    Args:
        options: as parsed.
        tell: is given a line on each key of DeepSpeed that has no effect, and on learning rates
            that another number of steps moves.
        decides: whether this process decides for all ranks if ``--elastic`` finds a run in the
            folder; else the first rank does, later, by `continues`.

    Raises:
        ConfigError, RunFolderError: options contradict each other, or no run is there to resume.
    """
    given = _said(options, tell)
    resume = getattr(options, "resume", None)
    out = getattr(options, "out", None)
    if resume is None and out is not None and decides and continues(options, out):
        resume = out
    if resume is None:
        return (
            _reading_its_tokens(RunConfig.of(**given)),
            out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}",
            False,
        )
    if out is not None and Path(out).resolve() != Path(resume).resolve():
        raise ConfigError(f"--out {out} contradicts --resume {resume}; a resumed run stays there")
    stored = RunFolder(Path(resume)).config()
    check_continuable(stored, given)
    config = stored.evolve(**_unkept(stored, given))
    if (line := stretched(stored, config)) is not None:
        tell(line)
    return config, resume, True


def continues(options: argparse.Namespace, out: str) -> bool:
    """Whether the run that the folder holds is continued.

    Raises:
        ConfigError, RunFolderError: there is one, and what was asked for would be another.
    """
    if hasattr(options, "resume"):
        return True
    if not getattr(options, "elastic", False) or not RunFolder(Path(out)).holds_run:
        return False
    check_continuable(RunFolder(Path(out)).config(), _said(options, lambda note: None))
    return True


def check_continuable(stored: RunConfig, given: Mapping[str, Any]) -> None:
    """Check that a run may go on with other settings.

    Args:
        stored: those of the run.
        given: the leaves that are asked for.

    Raises:
        ConfigError: one of them would make another run of it.
    """
    before = stored.leaves()
    for name in ("seed", "sequence_length"):
        if name in given and given[name] != before[name]:
            raise ConfigError(
                f"{option(name)} {given[name]} differs from the run's {before[name]}; the position "
                "in the data would mean another place"
            )
    _check_same_model(stored, given)
    _check_same_scaling(stored.dtype, given.get("dtype", stored.dtype))
    _check_same_optimizer(before["optimizer"], given.get("optimizer", before["optimizer"]))


def worker_arguments(config: RunConfig, out: str, resume: bool, as_json: bool) -> list[str]:
    """Return the command line with which each worker runs what was settled here."""
    arguments = ["train", "--prepared", "--resume" if resume else "--out", out, *written(config)]
    return [*arguments, "--json"] if as_json else arguments


def transport_of(options: argparse.Namespace) -> str:
    """Return what carries messages.

    Raises:
        ConfigError: two options contradict each other.
    """
    as_threads = getattr(options, "threads_as_ranks", False)
    chosen: str = getattr(options, "comm", "threads" if as_threads else "auto")
    if as_threads and chosen != "threads":
        raise ConfigError(f"--threads-as-ranks is --comm threads, got --comm {chosen} besides")
    return chosen


def allow_other_data(options: argparse.Namespace) -> bool:
    """Whether a run may be continued with data that has changed.

    Raises:
        ConfigError: no run is continued.
    """
    allowed = getattr(options, "allow_other_data", False)
    if allowed and not (hasattr(options, "resume") or hasattr(options, "elastic")):
        raise ConfigError("--allow-other-data has no effect without --resume or --elastic")
    return bool(allowed)


def _said(options: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return the leaves that the command line sets, and those of the files that it names."""
    given = given_leaves(options)
    file, foreign = getattr(options, "config", None), getattr(options, "deepspeed", None)
    drop = getattr(options, "drop_offload", False)
    if file is not None:
        given = {**RunConfig.read_leaves(Path(file)), **given}
    if foreign is None:
        if drop:
            raise ConfigError("--drop-offload has no effect without --deepspeed")
        return given
    reading = read_deepspeed(foreign, given, drop_offload=drop)
    for note in reading.notes:
        tell(f"{foreign}: {note}")
    return dict(reading.leaves)


def _reading_its_tokens(config: RunConfig) -> RunConfig:
    """Return the settings, with the tokenizer of the model's folder where none is named."""
    folder = Path(config.model.model)
    if config.model.model in PRESETS or config.data.tokenizer is not None:
        return config
    return config.evolve(tokenizer=str(folder)) if os.path.isfile(folder / TOKENIZER) else config


def _unkept(stored: RunConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is asked for; what a run has kept of its model says nothing of another one."""
    model = given.get("model", stored.model.model)
    is_same = model == stored.model.model or (
        model not in PRESETS and str(Path(model).resolve()) == stored.model.model
    )
    return dict(given) if is_same else {"model_config": None, **given}


def _check_same_model(stored: RunConfig, given: Mapping[str, Any]) -> None:
    wanted = _unkept(stored, given)
    changes = {name: wanted[name] for name in ("model", "model_config") if name in wanted}
    if not changes:
        return
    model = attrs.evolve(stored.model, **changes)
    if model != stored.model and model.shape != stored.model.shape:
        raise ConfigError(
            f"{model.model_config or model.model} is another model than that of the run, "
            f"{stored.model.model}, whose checkpoints it cannot go on from; leave --model and "
            "--model-config out, or begin a run of its own"
        )


def _check_same_scaling(stored: str, wanted: str) -> None:
    if stored != wanted and {stored, wanted} & set(SCALED):
        raise ConfigError(
            f"--dtype {wanted} differs from the run's {stored}: checkpoints of {', '.join(SCALED)} "
            "hold scales that others lack; any change among the other dtypes works"
        )


def _check_same_optimizer(stored: str, wanted: str) -> None:
    if stored != wanted:
        raise ConfigError(
            f"--optimizer {wanted} differs from the run's {stored}, whose states it cannot go on "
            f"from; resume with {stored}, or begin a run of its own"
        )
