"""Options that commands which look at a model have in common."""

from __future__ import annotations

import argparse

from trainwright.integration.config import DTYPES, RunConfig
from trainwright.integration.fitting import check_fits
from trainwright.integration.places import Place
from trainwright.integration.settling import TRANSPORTS

LEAVES = ("layout", "dtype", "zero", "seed", "sequence_length", "micro_batch")
"""Settings that these commands may change."""


def add_place(parser: argparse.ArgumentParser, *, computes: bool = True) -> None:
    """Add what says which model, how it is shared out, and how it computes, if it does."""
    add = parser.add_argument
    add("model", metavar="PLACE", help="a run's folder, or one of Hugging Face's libraries")
    add("--step", type=int, help="the checkpoint of that step (default: the newest)")
    add("--layout", help="mesh sizes, such as tp=2,pp=2 (default dp=1)")
    add("--zero", type=int, help="stage of sharded data parallelism (default 0)")
    if computes:
        add("--dtype", help=f"one of {', '.join(DTYPES)} (default: that of the run, or float32)")
    add("--comm", choices=TRANSPORTS, default="auto", help="what carries messages (default auto)")


def settings_for(place: Place, options: argparse.Namespace) -> RunConfig:
    """Return the settings with which the options look at a model.

    Raises:
        ConfigError: they do not fit the model.
    """
    found = {name: getattr(options, name, None) for name in LEAVES}
    given = {name: value for name, value in found.items() if value is not None}
    config = place.settings(given)
    check_fits(place.shape(), config)
    return config
