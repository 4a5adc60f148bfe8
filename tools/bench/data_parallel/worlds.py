"""What carries the messages of the stages; peers always talk over Gloo, as they do on a CPU."""

from __future__ import annotations

from trainwright.collectives import Communicator, SharedMemoryCommunicator

GLOO = "gloo"
SHM = "shm"
COMMS = (GLOO, SHM)


def connect(world: Communicator, comm: str) -> Communicator:
    """Return the communicator of the same ranks that a name stands for; all ranks call it.

    Args:
        world: the ranks over Gloo, of the default process group.
        comm: one of `COMMS`.
    """
    return world if comm == GLOO else SharedMemoryCommunicator()
