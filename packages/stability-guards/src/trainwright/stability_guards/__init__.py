"""Clipping, learning-rate schedules and guards that all ranks agree on."""

from trainwright.stability_guards.agreement import (
    Agreement,
    agree,
    report_from_totals,
    verdict_from_counts,
)
from trainwright.stability_guards.clipping import (
    clip_,
    clip_coefficient,
    clip_grad_norm_,
    non_finite_names,
)
from trainwright.stability_guards.decay import (
    decay_groups,
    decay_table,
)
from trainwright.stability_guards.errors import (
    GuardError,
    HaltError,
    NonFiniteGradientError,
    NotAvailableError,
)
from trainwright.stability_guards.fused_clipping import clipping_in_step
from trainwright.stability_guards.guards import (
    LocalVerdictGuard,
    NonFiniteGuard,
    any_of,
    never,
)
from trainwright.stability_guards.initial_loss import (
    check_initial_loss,
    expected_initial_loss,
)
from trainwright.stability_guards.norms import global_norm
from trainwright.stability_guards.protocol import (
    Guard,
    Report,
    Schedule,
    State,
    Totals,
    Verdict,
)
from trainwright.stability_guards.schedules import (
    WarmupSchedule,
    as_lambda_lr,
    constant,
    linear,
    warmup_cosine,
)

__all__ = [
    "Agreement",
    "Guard",
    "GuardError",
    "HaltError",
    "LocalVerdictGuard",
    "NonFiniteGradientError",
    "NonFiniteGuard",
    "NotAvailableError",
    "Report",
    "Schedule",
    "State",
    "Totals",
    "Verdict",
    "WarmupSchedule",
    "agree",
    "any_of",
    "as_lambda_lr",
    "check_initial_loss",
    "clip_",
    "clip_coefficient",
    "clip_grad_norm_",
    "clipping_in_step",
    "constant",
    "decay_groups",
    "decay_table",
    "expected_initial_loss",
    "global_norm",
    "linear",
    "never",
    "non_finite_names",
    "report_from_totals",
    "verdict_from_counts",
    "warmup_cosine",
]
