"""The few numbers that a person looks for first."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from trainwright.integration.outside_files import number
from trainwright.integration.report.reading import RunFacts
from trainwright.integration.report.scales import short


@attrs.frozen
class Tile:
    """One number with its name, and a remark."""

    name: str
    value: str
    note: str = ""


def tiles_of(facts: RunFacts) -> Iterator[Tile]:
    """Yield the numbers that are known."""
    columns = facts.columns
    loss, tokens = columns["loss"].finite, columns["tokens"].finite
    if len(loss):
        best = int(loss.values.argmin())
        note = f"least {short(loss.values[best])} at step {int(loss.steps[best]):,}"
        yield Tile("training loss", short(loss.values[-1]), note)
    if len(facts.held_out):
        held = facts.held_out
        best = int(held.values.argmin())
        note = f"at step {int(held.steps[-1]):,}"
        if best < len(held) - 1:
            note = f"least {short(held.values[best])} at step {int(held.steps[best]):,}"
        yield Tile("held-out loss", short(held.values[-1]), note)
    yield from _pace(facts)
    if len(tokens):
        yield Tile("tokens", short(float(tokens.values.sum())), "trained on")
    yield from _model(facts)
    if len(loss):
        yield _interventions(facts)


def _pace(facts: RunFacts) -> Iterator[Tile]:
    seconds = facts.columns["step_s"].finite
    rate, mfu = facts.columns["tokens_per_s"].finite, facts.columns["mfu"].finite
    if len(rate):
        yield Tile("tokens a second", short(float(np.median(rate.values)), 3), "median")
    if len(mfu):
        share = f"{100 * float(np.median(mfu.values)):.1f} %"
        yield Tile("MFU", share, f"median, of {facts.about.get('device', 'the device')}"[:80])
    if len(seconds):
        median = float(np.median(seconds.values))
        note = f"median; {span(float(seconds.values.sum()))} in all"
        yield Tile("a step", f"{short(median, 3)} s", note)
        wanted = facts.steps_wanted
        if wanted is not None and facts.steps_made < wanted:
            yield Tile("left", span(median * (wanted - facts.steps_made)), "at the median")


def _model(facts: RunFacts) -> Iterator[Tile]:
    parameters = number(facts.about.get("parameters"))
    if np.isfinite(parameters):
        each = number(facts.about.get("flops_per_token"))
        note = f"{short(each, 3)} FLOP a token" if np.isfinite(each) else ""
        yield Tile("parameters", short(parameters, 3), note)
    world = number(facts.about.get("world"))
    if np.isfinite(world):
        yield Tile("ranks", f"{int(world):,}", str(facts.about.get("layout", ""))[:80])


def _interventions(facts: RunFacts) -> Tile:
    kinds = [str(entry.get("verdict", "")) for entry in facts.interventions]
    skips, rollbacks = kinds.count("SKIP"), kinds.count("ROLLBACK")
    return Tile("interventions", str(len(kinds)), f"{skips} skips, {rollbacks} rollbacks")


def span(seconds: float) -> str:
    """Return a duration for a person."""
    if seconds < 120:
        return f"{short(seconds, 3)} s"
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h" if hours < 72 else f"{hours / 24:.1f} days"
