"""How a rank that raises stops its peers, which would otherwise wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainwright.collectives.protocol import Communicator


@contextmanager
def stopping_peers(comm: Communicator) -> Iterator[None]:
    """Tell the peers why this rank gives up, if the block raises.

    Their pending and later operations raise a `PeerFailedError` with the cause, instead of waiting
    until the timeout; the first cause of a world is the one that all ranks tell. `LocalWorld` does
    so by itself.

    Args:
        comm: Any communicator of the ranks to stop; those split from it stop as well.

    Raises:
        BaseException: What the block raises.

    Communicates:
        Nothing unless the block raises.
    """
    try:
        yield
    except BaseException as error:
        comm.abort(error)
        raise
