"""Laws of communicators, strategies for what ranks agree on, and real processes for tests."""

from trainwright.collectives.testing.cases import (
    Case,
    Layout,
    cases,
    contribution,
    lay_out,
    some_cases,
)
from trainwright.collectives.testing.laws import COMMUNICATOR_LAWS, LAWS_ABOUT_SHAPES, Law
from trainwright.collectives.testing.laws_of_codecs import CODEC_LAWS, CodecLaw
from trainwright.collectives.testing.processes import RemoteError, run_processes
from trainwright.collectives.testing.values import (
    box_partitions,
    boxes,
    keys,
    shapes,
    shard_partitions,
)

__all__ = [
    "CODEC_LAWS",
    "COMMUNICATOR_LAWS",
    "LAWS_ABOUT_SHAPES",
    "Case",
    "CodecLaw",
    "Law",
    "Layout",
    "RemoteError",
    "box_partitions",
    "boxes",
    "cases",
    "contribution",
    "keys",
    "lay_out",
    "run_processes",
    "shapes",
    "shard_partitions",
    "some_cases",
]
