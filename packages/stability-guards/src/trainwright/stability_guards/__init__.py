"""Clipping, learning-rate schedules, guards that all ranks agree on, and recovery."""

from trainwright.stability_guards.adaptive_clipping import clip_grad_adaptive_
from trainwright.stability_guards.agreement import (
    Agreement,
    agree,
    report_from_totals,
    verdict_from_counts,
)
from trainwright.stability_guards.bounds import (
    BoundGuard,
    GrowthGuard,
)
from trainwright.stability_guards.clipping import (
    clip_,
    clip_coefficient,
    clip_grad_norm_,
    non_finite_names,
)
from trainwright.stability_guards.combining import (
    after,
    agreeing,
    escalate,
)
from trainwright.stability_guards.composing import Chain, InverseSqrt, OverRamp, Transition, chain
from trainwright.stability_guards.decay import (
    decay_groups,
    decay_table,
)
from trainwright.stability_guards.decay_roles import SquareOf, decay_roles, decay_setter
from trainwright.stability_guards.errors import (
    AbandonedStateError,
    GuardError,
    HaltError,
    JournalError,
    NonFiniteGradientError,
    NotAvailableError,
)
from trainwright.stability_guards.fused_clipping import clipping_in_step
from trainwright.stability_guards.guards import (
    EmptyStepGuard,
    LocalVerdictGuard,
    NonFiniteGuard,
    any_of,
    never,
)
from trainwright.stability_guards.hygiene import QKNorm, shrink_gradient, z_loss, z_loss_of
from trainwright.stability_guards.initial_loss import (
    check_initial_loss,
    expected_initial_loss,
)
from trainwright.stability_guards.joint_spikes import (
    JointSpikeGuard,
)
from trainwright.stability_guards.journal import (
    FileJournal,
    Intervention,
    Journal,
    MemoryJournal,
    SharedJournal,
    shared_journal,
)
from trainwright.stability_guards.measures import (
    attention_logit_bound,
    largest_logit,
    update_ratio,
)
from trainwright.stability_guards.norms import counted_on, global_norm
from trainwright.stability_guards.pace import (
    Heartbeat,
    Silence,
    Straggler,
    StragglerWatch,
    gather_seconds,
)
from trainwright.stability_guards.positions import (
    Positions,
)
from trainwright.stability_guards.presets import (
    all_guards,
    default_guards,
)
from trainwright.stability_guards.protocol import (
    Guard,
    Report,
    Schedule,
    State,
    Totals,
    Verdict,
)
from trainwright.stability_guards.published import (
    LLAMA3_INTERRUPTIONS,
    PUBLISHED,
    Hyperparameters,
    checkpoint_interval,
    mean_time_between_failures,
)
from trainwright.stability_guards.qk_clip import (
    largest_logits,
    qk_clip_,
    qk_clip_factors,
    qk_clip_latent_,
)
from trainwright.stability_guards.ramps import BatchRamp, fixed_batch, linear_ramp, stepwise_ramp
from trainwright.stability_guards.recovery import Recovery, check_not_abandoned
from trainwright.stability_guards.recovery_plan import BatchSource, RecoveryPlan
from trainwright.stability_guards.replaying import (
    Alarm,
    read_metrics,
    replay,
    reports_of,
)
from trainwright.stability_guards.replicas import (
    Mismatch,
    checksum,
    checksums,
    compare_replicas,
)
from trainwright.stability_guards.schedules import (
    Rates,
    WarmupSchedule,
    as_lambda_lr,
    constant,
    linear,
    polynomial,
    warmup_cosine,
    warmup_stable_decay,
)
from trainwright.stability_guards.shapes import Power, half_cosine, one_minus_sqrt, straight
from trainwright.stability_guards.snapshots import (
    MemorySnapshots,
    Snapshot,
    Stateful,
    bytes_of,
)
from trainwright.stability_guards.spikes import (
    SpikeGuard,
)
from trainwright.stability_guards.trends import (
    DivergenceGuard,
    StallGuard,
)
from trainwright.stability_guards.value_clipping import clip_grad_value_
from trainwright.stability_guards.zclip import ZClip

__all__ = [
    "LLAMA3_INTERRUPTIONS",
    "PUBLISHED",
    "AbandonedStateError",
    "Agreement",
    "Alarm",
    "BatchRamp",
    "BatchSource",
    "BoundGuard",
    "Chain",
    "DivergenceGuard",
    "EmptyStepGuard",
    "FileJournal",
    "GrowthGuard",
    "Guard",
    "GuardError",
    "HaltError",
    "Heartbeat",
    "Hyperparameters",
    "Intervention",
    "InverseSqrt",
    "JointSpikeGuard",
    "Journal",
    "JournalError",
    "LocalVerdictGuard",
    "MemoryJournal",
    "MemorySnapshots",
    "Mismatch",
    "NonFiniteGradientError",
    "NonFiniteGuard",
    "NotAvailableError",
    "OverRamp",
    "Positions",
    "Power",
    "QKNorm",
    "Rates",
    "Recovery",
    "RecoveryPlan",
    "Report",
    "Schedule",
    "SharedJournal",
    "Silence",
    "Snapshot",
    "SpikeGuard",
    "SquareOf",
    "StallGuard",
    "State",
    "Stateful",
    "Straggler",
    "StragglerWatch",
    "Totals",
    "Transition",
    "Verdict",
    "WarmupSchedule",
    "ZClip",
    "after",
    "agree",
    "agreeing",
    "all_guards",
    "any_of",
    "as_lambda_lr",
    "attention_logit_bound",
    "bytes_of",
    "chain",
    "check_initial_loss",
    "check_not_abandoned",
    "checkpoint_interval",
    "checksum",
    "checksums",
    "clip_",
    "clip_coefficient",
    "clip_grad_adaptive_",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clipping_in_step",
    "compare_replicas",
    "constant",
    "counted_on",
    "decay_groups",
    "decay_roles",
    "decay_setter",
    "decay_table",
    "default_guards",
    "escalate",
    "expected_initial_loss",
    "fixed_batch",
    "gather_seconds",
    "global_norm",
    "half_cosine",
    "largest_logit",
    "largest_logits",
    "linear",
    "linear_ramp",
    "mean_time_between_failures",
    "never",
    "non_finite_names",
    "one_minus_sqrt",
    "polynomial",
    "qk_clip_",
    "qk_clip_factors",
    "qk_clip_latent_",
    "read_metrics",
    "replay",
    "report_from_totals",
    "reports_of",
    "shared_journal",
    "shrink_gradient",
    "stepwise_ramp",
    "straight",
    "update_ratio",
    "verdict_from_counts",
    "warmup_cosine",
    "warmup_stable_decay",
    "z_loss",
    "z_loss_of",
]
