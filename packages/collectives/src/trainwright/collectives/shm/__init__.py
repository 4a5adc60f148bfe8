"""Communication between the processes of one host, through memory that all of them see."""

from trainwright.collectives.shm.communicator import SharedMemoryCommunicator
from trainwright.collectives.shm.system import NotAvailableError
from trainwright.collectives.shm.torch_backend import register_backend

__all__ = [
    "NotAvailableError",
    "SharedMemoryCommunicator",
    "register_backend",
]
