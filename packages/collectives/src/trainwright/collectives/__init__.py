"""Communicators, collective algorithms and what ranks must agree on, for PyTorch."""

from trainwright.collectives import differentiable
from trainwright.collectives import random
from trainwright.collectives.box import Box
from trainwright.collectives.errors import CollectiveError
from trainwright.collectives.errors import CollectiveTimeoutError
from trainwright.collectives.errors import PeerFailedError
from trainwright.collectives.errors import UsageError
from trainwright.collectives.local_world import LocalWorld
from trainwright.collectives.protocol import Communicator
from trainwright.collectives.protocol import Recv
from trainwright.collectives.protocol import ReduceOp
from trainwright.collectives.protocol import Send
from trainwright.collectives.protocol import Work
from trainwright.collectives.shard_spec import ShardSpec
from trainwright.collectives.single import SingleCommunicator

__all__ = [
    "Box",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Communicator",
    "LocalWorld",
    "PeerFailedError",
    "Recv",
    "ReduceOp",
    "Send",
    "ShardSpec",
    "SingleCommunicator",
    "UsageError",
    "Work",
    "differentiable",
    "random",
]
