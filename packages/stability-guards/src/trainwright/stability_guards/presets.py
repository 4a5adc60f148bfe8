"""Guards put together for a run, tuned on `curves` before any of them met a real one."""

from __future__ import annotations

from trainwright.stability_guards.bounds import BoundGuard, GrowthGuard
from trainwright.stability_guards.combining import escalate
from trainwright.stability_guards.guards import LocalVerdictGuard, NonFiniteGuard, any_of
from trainwright.stability_guards.joint_spikes import JointSpikeGuard
from trainwright.stability_guards.protocol import Guard
from trainwright.stability_guards.trends import DivergenceGuard, StallGuard


def default_guards(*, max_consecutive_skips: int = 20) -> Guard:
    """Return the guards that a run has unless it says otherwise.

    Non-finite steps are skipped, spikes are skipped and, where they return, lead to ROLLBACK and at
    last to HALT, a divergence leads to ROLLBACK, and what a rank says by itself is heard.
    """
    return any_of(
        NonFiniteGuard(max_consecutive_skips),
        LocalVerdictGuard(),
        escalate(JointSpikeGuard()),
        DivergenceGuard(),
    )


def all_guards(*, max_consecutive_skips: int = 20) -> Guard:
    """Return every guard of this package: those of `default_guards`, stall, and model signals.

    The signals ``update_ratio`` (update over weight), ``logit_max`` and ``attention_logit_max``
    are watched where reports bring them.
    """
    return any_of(
        default_guards(max_consecutive_skips=max_consecutive_skips),
        StallGuard(),
        BoundGuard("update_ratio", 0.1, in_a_row=3),
        GrowthGuard("logit_max", floor=50.0),
        GrowthGuard("attention_logit_max", floor=50.0),
    )
