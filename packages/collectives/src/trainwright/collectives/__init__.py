"""Communicators, collective algorithms and what ranks must agree on, for PyTorch."""

from trainwright.collectives import (
    algorithms,
    codec,
    cost,
    differentiable,
    random,
    sweeps,
    topology,
)
from trainwright.collectives.box import Box
from trainwright.collectives.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    PeerFailedError,
    UsageError,
)
from trainwright.collectives.local_world import LocalWorld
from trainwright.collectives.protocol import Communicator, Recv, ReduceOp, Send, Work
from trainwright.collectives.shard_spec import ShardSpec
from trainwright.collectives.single import SingleCommunicator
from trainwright.collectives.torch_communicator import TorchCommunicator

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
    "TorchCommunicator",
    "UsageError",
    "Work",
    "algorithms",
    "codec",
    "cost",
    "differentiable",
    "random",
    "sweeps",
    "topology",
]
