"""What must fit together in a run: model, batch, layout and the ways to share states out."""

from __future__ import annotations

from trainwright.checkpointing.activations import parse_keeper, parse_policy
from trainwright.integration.config import RunConfig
from trainwright.integration.data.reader import check_batch
from trainwright.integration.errors import ConfigError
from trainwright.integration.float8_fitting import check_float8
from trainwright.integration.guarding import read_guards
from trainwright.integration.model import ModelShape
from trainwright.integration.sequence_part import row_of
from trainwright.integration.sharded import gathers_stages
from trainwright.pipeline_schedules import GENERATORS
from trainwright.sharding import MeshShape


def check_fits(shape: ModelShape, mesh: MeshShape, config: RunConfig) -> None:
    """Check that model, batch and layout divide as they must.

    Raises:
        ConfigError: naming the size that does not divide and the nearest values that work.
    """
    _check_experts(shape, mesh, config)
    for name in ("heads", "vocabulary", *(("mlp_width",) if shape.experts is None else ())):
        size = getattr(shape, name)
        if size < mesh.tp:
            raise ConfigError(
                f"--layout {config.layout}: tp={mesh.tp} ranks cannot share {name}={size} of model "
                f"{config.model}; tp up to {size} works"
            )
    check_float8(shape, mesh, config)
    _check_sequence(mesh, config)
    _check_pipeline(shape, mesh, config)
    check_batch(config.global_batch, mesh.dp, config.microbatches)
    _check_sharding(mesh, config)
    _check_saving(config)
    if config.warmup_steps > config.steps:
        raise ConfigError(
            f"--warmup {config.warmup} must be at most --steps {config.steps}, "
            "the last update of the run"
        )
    _check_activations(config)
    read_guards(config.guards, config.exclude)


def _check_experts(shape: ModelShape, mesh: MeshShape, config: RunConfig) -> None:
    if shape.experts is None:
        if mesh.ep > 1 or mesh.etp != mesh.tp:
            raise ConfigError(
                f"--layout {config.layout}: ep={mesh.ep}, etp={mesh.etp} ranks share experts, of "
                f"which model {config.model} has none; --model tiny-moe has some"
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
                f"--layout {config.layout}: {axis}={ranks} must divide the {size} {what} of model "
                f"{config.model}; one of {works} works"
            )


def _check_pipeline(shape: ModelShape, mesh: MeshShape, config: RunConfig) -> None:
    only = GENERATORS[config.schedule].chunks
    if only is not None and config.chunks not in (None, only):
        raise ConfigError(
            f"--chunks {config.chunks}: schedule {config.schedule} has {only} a rank; "
            "interleaved-1f1b and breadth-first take any number"
        )
    stages = config.num_stages
    if stages > shape.layers:
        chunks = stages // mesh.pp
        counted = f"pp={mesh.pp}" if chunks == 1 else f"pp={mesh.pp} x {chunks} chunks"
        most = shape.layers // chunks
        way_out = f"pp up to {most} works" if most else f"--chunks up to {shape.layers} works"
        raise ConfigError(
            f"--layout {config.layout}: {counted} stages need at least as many layers, model "
            f"{config.model} has {shape.layers}; {way_out}"
        )


def _check_sharding(mesh: MeshShape, config: RunConfig) -> None:
    unused = {
        "--gather": config.gather != "auto" and config.zero < 3 and "stage 3 gathers weights",
        "--reduce": config.reduce != "step" and config.zero < 2 and "stages 2 and 3 cut gradients",
        "--layout dp_shard": mesh.dp_shard not in (None, mesh.dp)
        and config.zero < 1
        and "stages 1 to 3 share model states out",
    }
    for option, reason in unused.items():
        if reason:
            raise ConfigError(f"{option} has no effect with --zero {config.zero}; {reason}")


def _check_activations(config: RunConfig) -> None:
    try:
        parse_policy(config.recompute)
    except ValueError as error:
        raise ConfigError(f"--recompute {config.recompute}: {error}") from error
    if config.recompute.startswith("budget") and config.zero == 3 and not gathers_stages(config):
        raise ConfigError(
            f"--recompute {config.recompute} runs layers in another order once it has measured "
            "them, and --zero 3 gathers them unit by unit in one; --gather step works, or "
            "--recompute sqrt"
        )
    try:
        parse_keeper(config.offload_activations, config.compress_activations)
    except ValueError as error:
        raise ConfigError(f"--offload-activations {config.offload_activations}: {error}") from error


def _check_saving(config: RunConfig) -> None:
    every, kept = config.save_every, config.keep_every
    if not every and (kept or config.async_save):
        option = f"--keep-every {kept}" if kept else "--async-save"
        raise ConfigError(f"{option} has no effect with --save-every 0, which saves at the end")
    if kept and config.keep is None:
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


def _check_sequence(mesh: MeshShape, config: RunConfig) -> None:
    if config.context != "ring" and mesh.cp == 1:
        raise ConfigError(
            f"--context {config.context} has no effect with --layout {config.layout}: it says how "
            "ranks that share sequences attend; set cp"
        )
    if config.context == "hybrid" and row_of(mesh.cp) == 1:
        raise ConfigError(
            f"--context hybrid with --layout {config.layout}: cp={mesh.cp} ranks make no rows of "
            "two and more; take --context ring, or cp=4, 6, 8, 9, ..."
        )
    if config.sequence_length < mesh.cp:
        raise ConfigError(
            f"--layout {config.layout}: --sequence-length {config.sequence_length} has fewer "
            f"positions than cp={mesh.cp} ranks; cp up to {config.sequence_length} works"
        )
    if not config.sequence_parallel:
        return
    if mesh.tp == 1:
        raise ConfigError(
            f"--sequence-parallel has no effect with --layout {config.layout}: it cuts sequences "
            "over tensor-parallel ranks; set tp, or --no-sequence-parallel"
        )
    if config.sequence_length // mesh.cp < mesh.tp:
        raise ConfigError(
            f"--sequence-parallel: --sequence-length {config.sequence_length} has fewer positions "
            f"for each of cp={mesh.cp} than tp={mesh.tp} ranks; {mesh.cp * mesh.tp} and more work"
        )
