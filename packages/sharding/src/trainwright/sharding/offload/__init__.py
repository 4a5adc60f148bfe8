"""States and weights kept in host memory or in a file, updated there unit by unit."""

from trainwright.sharding.offload.errors import OffloadError
from trainwright.sharding.offload.file import FileSlot, FileStore
from trainwright.sharding.offload.host import HostMemory, HostSlot
from trainwright.sharding.offload.lanes import Lane, Pace
from trainwright.sharding.offload.ledger import Ledger
from trainwright.sharding.offload.plan import Offload, offload_to_folder, offload_to_host
from trainwright.sharding.offload.protocol import Slot, StepUnit, Store
from trainwright.sharding.offload.stepping import OffloadedStep

__all__ = [
    "FileSlot",
    "FileStore",
    "HostMemory",
    "HostSlot",
    "Lane",
    "Ledger",
    "Offload",
    "OffloadError",
    "OffloadedStep",
    "Pace",
    "Slot",
    "StepUnit",
    "Store",
    "offload_to_folder",
    "offload_to_host",
]
