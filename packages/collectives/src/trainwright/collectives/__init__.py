"""Communicators, collective algorithms and what ranks must agree on, for PyTorch."""

from trainwright.collectives import (
    algorithms,
    buckets,
    codec,
    cost,
    differentiable,
    random,
    sweeps,
    topology,
)
from trainwright.collectives.box import Box
from trainwright.collectives.errors import (
    BufferInFlightError,
    CollectiveError,
    CollectiveTimeoutError,
    PeerFailedError,
    UsageError,
)
from trainwright.collectives.flight import FlightRecorder
from trainwright.collectives.local_world import LocalWorld
from trainwright.collectives.objects import all_gather_object, broadcast_object, run_on_root
from trainwright.collectives.placing import Placing, empty_on
from trainwright.collectives.protocol import Communicator, Recv, ReduceOp, Send, Work
from trainwright.collectives.recorded import Recorded
from trainwright.collectives.shard_spec import ShardSpec
from trainwright.collectives.shm import (
    NotAvailableError,
    SharedMemoryCommunicator,
    register_backend,
)
from trainwright.collectives.single import SingleCommunicator
from trainwright.collectives.stopping import stopping_peers
from trainwright.collectives.torch_communicator import TorchCommunicator
from trainwright.collectives.traffic import Traffic
from trainwright.collectives.uneven import all_gather_uneven
from trainwright.collectives.watched import Watched

__all__ = [
    "Box",
    "BufferInFlightError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Communicator",
    "FlightRecorder",
    "LocalWorld",
    "NotAvailableError",
    "PeerFailedError",
    "Placing",
    "Recorded",
    "Recv",
    "ReduceOp",
    "Send",
    "ShardSpec",
    "SharedMemoryCommunicator",
    "SingleCommunicator",
    "TorchCommunicator",
    "Traffic",
    "UsageError",
    "Watched",
    "Work",
    "algorithms",
    "all_gather_object",
    "all_gather_uneven",
    "broadcast_object",
    "buckets",
    "codec",
    "cost",
    "differentiable",
    "empty_on",
    "random",
    "register_backend",
    "run_on_root",
    "stopping_peers",
    "sweeps",
    "topology",
]
