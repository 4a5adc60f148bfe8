"""What must fit together where layers multiply FP8 operands."""

from __future__ import annotations

from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.model import ModelShape
from trainwright.precision import policy
from trainwright.sharding import MeshShape
from trainwright.sharding.tensor import Cut, HeadLayout

BLOCKS = {"fp8-block": 128, "fp8-mx": 32}
"""Neighbouring elements that have one scale, where not all of a matrix or row have."""

_WITHOUT = "fp8-delayed, fp8-current and fp8-row have no blocks"


def check_float8(shape: ModelShape, mesh: MeshShape, config: RunConfig) -> None:
    """Check that every rank has whole blocks of whole matrices.

    Raises:
        ConfigError: a rank would scale its part of a matrix otherwise than one rank alone.
    """
    if policy(config.dtype).recipe is None:
        return
    model = config.model.model
    if shape.experts is not None:
        raise ConfigError(
            f"--dtype {config.dtype}: experts have no FP8 products, and model {model} has "
            "experts; bfloat16 works"
        )
    if config.dtype not in BLOCKS:
        return
    if mesh.cp > 1:
        raise ConfigError(
            f"--dtype {config.dtype} has blocks of neighbouring positions, and cp={mesh.cp} ranks "
            f"of --layout {config.parallel.layout} have other neighbours than one; {_WITHOUT}"
        )
    if mesh.tp == 1:
        return
    if shape.latent is not None:
        raise ConfigError(
            f"--dtype {config.dtype}: tp={mesh.tp} ranks do not cut the latent attention of model "
            f"{model} at blocks of its operands; {_WITHOUT}, and tp=1 cuts nothing"
        )
    block = BLOCKS[config.dtype]
    for what, cut in _cuts(shape, mesh.tp).items():
        edge = _edge_within_a_block(cut, block)
        if edge is not None:
            raise ConfigError(
                f"--dtype {config.dtype}: tp={mesh.tp} ranks cut the {cut.size} {what} of model "
                f"{model} at {edge}, within a block of {block}; {_WITHOUT}, and tp=1 cuts nothing"
            )


def _cuts(shape: ModelShape, tp: int) -> dict[str, Cut]:
    heads = HeadLayout(shape.heads, shape.kv_heads, shape.head_width, tp)
    return {
        "features of queries": heads.query_cut(),
        "features of keys": heads.kv_used_cut(),
        "features of the MLP": Cut.balanced(shape.mlp_width, tp),
    }


def _edge_within_a_block(cut: Cut, block: int) -> int | None:
    for ranges in cut.ranges:
        for start, stop in ranges:
            for edge in (start, stop):
                # The last block of the whole may be smaller.
                if edge % block and edge != cut.size:
                    return edge
    return None
