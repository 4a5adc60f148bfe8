"""What must fit together in a run: model, batch, layout and the ways to share states out."""

from __future__ import annotations

import attrs

from trainwright.checkpointing.activations import parse_keeper, parse_policy
from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.float8_fitting import check_float8
from trainwright.integration.guarding import GuardPlan, read_guards
from trainwright.integration.head_clipping import check_head_clipping
from trainwright.integration.model import ModelShape
from trainwright.integration.numerics import scales_losses
from trainwright.integration.offloading import check_offload, without_copies
from trainwright.integration.ramping import microbatch_counts
from trainwright.integration.rates import check_rates
from trainwright.integration.sequence_part import row_of
from trainwright.integration.settings import ParallelSettings, SavingSettings, ScalingSettings
from trainwright.integration.sharded import gathers_stages
from trainwright.integration.signals import check_signals
from trainwright.integration.values import option
from trainwright.pipeline_schedules import GENERATORS
from trainwright.sharding import MeshShape


def check_fits(shape: ModelShape, config: RunConfig) -> None:
    """Check that model, batch and layout divide as they must.

    Raises:
        ConfigError: naming the size that does not divide and the nearest values that work.
    """
    parallel, batch, mesh = config.parallel, config.batch, config.parallel.mesh
    _check_experts(shape, mesh, config)
    for name in ("heads", "vocabulary", *(("mlp_width",) if shape.experts is None else ())):
        size = getattr(shape, name)
        if size < mesh.tp:
            raise ConfigError(
                f"--layout {parallel.layout}: tp={mesh.tp} ranks cannot share {name}={size} of "
                f"model {config.model.model}; tp up to {size} works"
            )
    check_float8(shape, mesh, config)
    _check_length(shape, batch.sequence_length)
    _check_sequence(mesh, parallel, batch.sequence_length)
    _check_pipeline(shape, mesh, config)
    batch.sizes(mesh.dp, mesh.pp)
    _check_sharding(mesh, config)
    _check_tied_ends(shape, config)
    check_offload(config)
    _check_saving(config.saving)
    check_rates(config)
    _check_ramp(config)
    check_head_clipping(config, shape)
    _check_activations(config)
    _check_scaling(config)


def fitting_guards(shape: ModelShape, config: RunConfig) -> GuardPlan:
    """Return what watches a run of the model.

    Raises:
        ConfigError: a file cannot be read, the model does not bring what a guard watches, or
            snapshots are asked for of states that a file keeps.
    """
    guards, exclude = config.guards.guards, config.guards.exclude
    plan = read_guards(guards, exclude, scales_losses=scales_losses(config))
    check_signals(guards, plan.signals, shape)
    return without_copies(config, plan)


def _check_experts(shape: ModelShape, mesh: MeshShape, config: RunConfig) -> None:
    layout, model = f"--layout {config.parallel.layout}", config.model.model
    if shape.experts is None:
        if mesh.ep > 1 or mesh.etp != mesh.tp:
            raise ConfigError(
                f"{layout}: ep={mesh.ep}, etp={mesh.etp} ranks share experts, of "
                f"which model {model} has none; --model tiny-moe has some"
            )
        return
    for size, ranks, what, axis in (
        (shape.experts.routing.num_experts, mesh.ep, "experts", "ep"),
        (shape.experts.width, mesh.etp, "features of an expert", "etp"),
        (shape.experts.shared_width or 0, mesh.tp, "features of the shared expert", "tp"),
    ):
        if size % ranks:
            works = [n for n in range(1, size + 1) if size % n == 0]
            raise ConfigError(
                f"{layout}: {axis}={ranks} must divide the {size} {what} of model "
                f"{model}; one of {works} works"
            )


def _check_pipeline(shape: ModelShape, mesh: MeshShape, config: RunConfig) -> None:
    parallel = config.parallel
    only = GENERATORS[parallel.schedule].chunks
    if only is not None and parallel.chunks not in (None, only):
        raise ConfigError(
            f"--chunks {parallel.chunks}: schedule {parallel.schedule} has {only} a rank; "
            "interleaved-1f1b and breadth-first take any number"
        )
    stages = parallel.num_stages
    if stages > shape.layers:
        chunks = stages // mesh.pp
        counted = f"pp={mesh.pp}" if chunks == 1 else f"pp={mesh.pp} x {chunks} chunks"
        most = shape.layers // chunks
        way_out = f"pp up to {most} works" if most else f"--chunks up to {shape.layers} works"
        raise ConfigError(
            f"--layout {parallel.layout}: {counted} stages need at least as many layers, "
            f"model {config.model.model} has {shape.layers}; {way_out}"
        )
    parallel.layers_of_stages(shape.layers)


def _check_ramp(config: RunConfig) -> None:
    chosen, parallel = GENERATORS[config.parallel.schedule], config.parallel
    if config.batch.ramp_from is None:
        return
    for count in microbatch_counts(config):
        try:
            chosen.make(parallel.mesh.pp, count, parallel.chunks)
        except ValueError as error:
            raise ConfigError(
                f"--ramp-from {config.batch.ramp_from}: schedule {parallel.schedule} of a batch of "
                f"{count} microbatches: {error}"
            ) from error


def _check_sharding(mesh: MeshShape, config: RunConfig) -> None:
    parallel, zero = config.parallel, config.parallel.zero
    unused = {
        "--gather": parallel.gather != "auto" and zero < 3 and "stage 3 gathers weights",
        "--reduce": parallel.reduce != "step" and zero < 2 and "stages 2 and 3 cut gradients",
        "--layout dp_shard": mesh.dp_shard not in (None, mesh.dp)
        and zero < 1
        and "stages 1 to 3 share model states out",
        "--bucket-bytes": parallel.bucket_bytes and zero == 3 and "there a unit is reduced at once",
        "--live-units": parallel.live_units and zero < 3 and "stage 3 gathers weights",
    }
    for name, reason in unused.items():
        if reason:
            raise ConfigError(f"{name} has no effect with --zero {zero}; {reason}")
    if parallel.live_units and gathers_stages(config):
        raise ConfigError(
            f"--live-units {parallel.live_units} has no effect where whole stages are gathered; "
            "--gather unit works"
        )


def _check_tied_ends(shape: ModelShape, config: RunConfig) -> None:
    """Refuse hooks around units where both uses of one embedding are stages of one rank.

    The parameters of these stages are one model, which is never called: hooks do not see when the
    embedding is needed, and its passes through one stage and the other have two orders.
    """
    parallel = config.parallel
    is_cut = parallel.zero == 3 and not gathers_stages(config) and parallel.num_stages > 1
    if not (shape.tied and is_cut):
        return
    ranks = GENERATORS[parallel.schedule].make(parallel.mesh.pp, 1, parallel.chunks).rank_of_stage
    if ranks[0] == ranks[-1]:
        raise ConfigError(
            f"--gather {parallel.gather}: with --schedule {parallel.schedule} and "
            f"pp={parallel.mesh.pp} one rank has the first and the last stage, whose tied "
            "embedding cannot be gathered unit by unit; --gather step or action works"
        )


def _check_activations(config: RunConfig) -> None:
    recompute = config.activations.recompute
    offload = config.activations.offload_activations
    try:
        parse_policy(recompute)
    except ValueError as error:
        raise ConfigError(f"--recompute {recompute}: {error}") from error
    unit_by_unit = config.parallel.zero == 3 and not gathers_stages(config)
    if recompute.startswith("budget") and unit_by_unit:
        raise ConfigError(
            f"--recompute {recompute} runs layers in another order once it has measured "
            "them, and --zero 3 gathers them unit by unit in one; --gather step works, or "
            "--recompute sqrt"
        )
    try:
        parse_keeper(offload, config.activations.compress_activations)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--offload-activations {offload}: {error}") from error


def _check_scaling(config: RunConfig) -> None:
    if scales_losses(config):
        return
    for field in attrs.fields(ScalingSettings):
        value = getattr(config.scaling, field.name)
        if value != field.default:
            raise ConfigError(
                f"{option(field.name)} {value} has no effect with --dtype {config.dtype}, whose "
                "losses are not scaled; --dtype float16 scales them"
            )


def _check_saving(saving: SavingSettings) -> None:
    every, kept = saving.save_every, saving.keep_every
    if not every and (kept or saving.async_save):
        given = f"--keep-every {kept}" if kept else "--async-save"
        raise ConfigError(f"{given} has no effect with --save-every 0, which saves at the end")
    if kept and saving.keep is None:
        raise ConfigError(
            f"--keep-every {kept} has no effect without --keep: all checkpoints stay; "
            "give --keep the number of the last ones that stay besides"
        )
    if kept and kept % every:
        below = kept // every * every
        nearest = f"{below} or {below + every}" if below else f"{every}"
        raise ConfigError(
            f"--keep-every {kept} must be a multiple of --save-every {every}; {nearest} works"
        )


def _check_length(shape: ModelShape, length: int) -> None:
    limits = {"sliding window": shape.window}
    if shape.positions == "learned":
        limits["table of positions"] = shape.max_positions
    for what, limit in limits.items():
        if limit is not None and length > limit:
            raise ConfigError(
                f"--sequence-length {length} is beyond the model's {what} of {limit}; up to "
                f"{limit} works"
            )


def _check_sequence(mesh: MeshShape, parallel: ParallelSettings, length: int) -> None:
    layout = f"--layout {parallel.layout}"
    if parallel.context != "ring" and mesh.cp == 1:
        raise ConfigError(
            f"--context {parallel.context} has no effect with {layout}: it says how "
            "ranks that share sequences attend; set cp"
        )
    if parallel.context == "hybrid" and row_of(mesh.cp) == 1:
        raise ConfigError(
            f"--context hybrid with {layout}: cp={mesh.cp} ranks make no rows of "
            "two and more; take --context ring, or cp=4, 6, 8, 9, ..."
        )
    if length < mesh.cp:
        raise ConfigError(
            f"{layout}: --sequence-length {length} has fewer "
            f"positions than cp={mesh.cp} ranks; cp up to {length} works"
        )
    if not parallel.sequence_parallel:
        return
    if mesh.tp == 1:
        raise ConfigError(
            f"--sequence-parallel has no effect with {layout}: it cuts sequences "
            "over tensor-parallel ranks; set tp, or --no-sequence-parallel"
        )
    if length // mesh.cp < mesh.tp:
        raise ConfigError(
            f"--sequence-parallel: --sequence-length {length} has fewer positions "
            f"for each of cp={mesh.cp} than tp={mesh.tp} ranks; {mesh.cp * mesh.tp} and more work"
        )
