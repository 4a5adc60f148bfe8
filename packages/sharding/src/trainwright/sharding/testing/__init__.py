"""Strategies for meshes and sizes, and the laws that parallel modules keep."""

from trainwright.sharding.testing.given_laws import check_products, check_weight_codec
from trainwright.sharding.testing.laws import (
    assert_close,
    check_computes_the_plain_module,
    check_pieces_tile_the_parameters,
    load_plain_,
    mesh_of,
)
from trainwright.sharding.testing.strategies import (
    layouts_of,
    mesh_shapes,
    orders,
    shard_sizes,
)

__all__ = [
    "assert_close",
    "check_computes_the_plain_module",
    "check_pieces_tile_the_parameters",
    "check_products",
    "check_weight_codec",
    "layouts_of",
    "load_plain_",
    "mesh_of",
    "mesh_shapes",
    "orders",
    "shard_sizes",
]
