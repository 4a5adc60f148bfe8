"""A communicator of one rank, for code that is parallel by argument and serial by choice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.collectives.arithmetic import normalize_device
from trainwright.collectives.calls import Call
from trainwright.collectives.checked import CheckedCommunicator
from trainwright.collectives.errors import PeerFailedError
from trainwright.collectives.protocol import Recv, Send, Work
from trainwright.collectives.works import DONE


class SingleCommunicator(CheckedCommunicator):
    """A group of one: collectives are copies or nothing, there is nobody to send to.

    Args:
        device: where tensors must live.

    Raises:
        UsageError: by ``send``, ``recv`` and ``exchange``, as there is no peer.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(_SingleBackend(normalize_device(device), "single"))


def compute_alone(call: Call) -> None:
    """Do what a collective does in a group of one."""
    output = call.output
    if call.op is not None and call.op.is_logical:
        assert output is not None
        assert call.input is not None
        with torch.no_grad():
            output.copy_(call.input.to(torch.bool).view_as(output))
        return
    if output is not None and call.input is not None and output is not call.input:
        with torch.no_grad():
            output.copy_(call.input.view_as(output))


class _SingleBackend:
    def __init__(self, device: torch.device, name: str) -> None:
        self.rank = 0
        self.size = 1
        self.device = device
        self.name = name
        self._failure: PeerFailedError | None = None

    def start(self, call: Call) -> Work:
        if self._failure is not None:
            raise self._failure
        compute_alone(call)
        return DONE

    def exchange(self, messages: Sequence[Send | Recv], timeout_s: float | None) -> Work:
        return DONE

    def start_together(self, pending: Sequence[Call | Sequence[Send | Recv]]) -> list[Work]:
        return [self.start(item) if isinstance(item, Call) else DONE for item in pending]

    def split(self, color: int | None, key: int) -> _SingleBackend | None:
        if self._failure is not None:
            raise self._failure
        return None if color is None else _SingleBackend(self.device, f"{self.name}/{color}")

    def abort(self, cause: str) -> None:
        self._failure = PeerFailedError(0, cause)
