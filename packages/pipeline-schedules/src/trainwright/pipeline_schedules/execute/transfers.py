"""The messages of one run on one rank: started early, waited for late, dropped when done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import attrs
import torch

from trainwright.collectives import Work
from trainwright.pipeline_schedules.execute.boundary import BoundarySpec, Crossing, TensorSpec
from trainwright.pipeline_schedules.execute.header import (
    FIRST_INTS,
    decode,
    encode,
    missing_ints,
)
from trainwright.pipeline_schedules.execute.protocol import Transport

Slot = tuple[int, int]
"""A stage and a microbatch."""


@attrs.frozen(eq=False)
class Links:
    """Who sits where, and how messages travel; the same in every run.

    Args:
        transport: Carries the messages.
        rank_of_stage: The rank that owns each stage.
        boundary: Declared boundaries; the others travel with a header.
        receive_ahead: Whether the transport pairs messages by tag, so that the order in which
            different messages are started does not matter.
    """

    transport: Transport
    rank_of_stage: tuple[int, ...]
    boundary: BoundarySpec
    receive_ahead: bool

    def is_local(self, stage: int, neighbour: int) -> bool:
        """Whether two stages lie on one rank, so that nothing travels between them."""
        return self.rank_of_stage[stage] == self.rank_of_stage[neighbour]

    def sender(self, slot: Slot, step: int) -> Callable[[torch.Tensor], Work]:
        """A function that sends to the neighbour ``step`` stages on."""
        peer, tag = self._address(slot, step)
        return lambda tensor: self.transport.send(tensor, peer, tag)

    def receiver(self, slot: Slot, step: int) -> Callable[[torch.Tensor], Work]:
        """A function that receives from the neighbour ``step`` stages on."""
        peer, tag = self._address(slot, step)
        return lambda tensor: self.transport.recv(tensor, peer, tag)

    def _address(self, slot: Slot, step: int) -> tuple[int, int]:
        # Each boundary and microbatch has its own tag, output one way and gradient the other: with
        # two ranks the neighbours before and behind are the same peer, and nothing else would tell
        # their messages apart.
        stage, microbatch = slot
        tag = microbatch * len(self.rank_of_stage) + min(stage, stage + step)
        return self.rank_of_stage[stage + step], tag


class Transfers:
    """Messages of one run: at most ``window`` sends are left open in each direction.

    Sends of outputs end by `settle_output`, called when the gradient that answers them is there,
    or by the window; the rest by `finish`.
    """

    def __init__(self, links: Links, window: int) -> None:
        self._links = links
        self._window = max(window, 1)
        self._inputs: dict[Slot, _IncomingCrossing] = {}
        self._gradients: dict[Slot, _Incoming] = {}
        self._sent_outputs: dict[Slot, _Outgoing] = {}
        self._sent_gradients: deque[_Outgoing] = deque()

    def expect_input(self, slot: Slot) -> None:
        """Start receiving what the stage before hands to this one."""
        receive = self._links.receiver(slot, -1)
        declared = self._links.boundary.declared(slot[0] - 1)
        incoming = _IncomingCrossing(receive, self._links.transport.device, declared)
        if not self._links.receive_ahead:
            incoming.read_header()
        self._inputs[slot] = incoming

    def await_input(self, slot: Slot) -> tuple[Crossing, list[torch.Tensor]]:
        """Wait for a boundary input."""
        return self._inputs.pop(slot).wait()

    def send_output(self, slot: Slot, crossing: Crossing, tensors: Sequence[torch.Tensor]) -> None:
        """Start sending a stage's output, behind a header where the boundary is not declared."""
        send = self._links.sender(slot, 1)
        messages = [_on_the_wire(tensor) for tensor in tensors]
        if slot[0] not in self._links.boundary.outputs:
            messages[:0] = _header_messages(crossing, self._links.transport.device)
        self._sent_outputs[slot] = _Outgoing(send, messages)
        if len(self._sent_outputs) > self._window:
            self.settle_output(next(iter(self._sent_outputs)))

    def settle_output(self, slot: Slot) -> None:
        """Let go of a sent output."""
        sent = self._sent_outputs.pop(slot, None)
        if sent is not None:
            sent.wait()

    def expect_gradient(self, slot: Slot, specs: Sequence[TensorSpec]) -> None:
        """Start receiving the gradients of a stage's output, one message for each spec."""
        receive = self._links.receiver(slot, 1)
        self._gradients[slot] = _Incoming(receive, self._links.transport.device, specs)

    def await_gradient(self, slot: Slot) -> list[torch.Tensor]:
        """Wait for the gradients of a stage's output."""
        return self._gradients.pop(slot).wait()

    def send_gradient(self, slot: Slot, gradients: Sequence[torch.Tensor]) -> None:
        """Start sending the gradients of a stage's boundary inputs."""
        send = self._links.sender(slot, -1)
        messages = [_on_the_wire(gradient) for gradient in gradients]
        self._sent_gradients.append(_Outgoing(send, messages))
        if len(self._sent_gradients) > self._window:
            self._sent_gradients.popleft().wait()

    def finish(self) -> None:
        """Wait for every send that is still open."""
        for slot in list(self._sent_outputs):
            self.settle_output(slot)
        while self._sent_gradients:
            self._sent_gradients.popleft().wait()


class _Outgoing:
    """Started sends and the tensors they read."""

    def __init__(
        self, send: Callable[[torch.Tensor], Work], messages: Sequence[torch.Tensor]
    ) -> None:
        self._messages = [message for message in messages if message.numel()]
        self._works = [send(message) for message in self._messages]

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _Incoming:
    """Started receives and the tensors they fill; empty tensors do not travel."""

    def __init__(
        self,
        receive: Callable[[torch.Tensor], Work],
        device: torch.device,
        specs: Sequence[TensorSpec],
    ) -> None:
        self._tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
        self._works = [receive(_on_the_wire(tensor)) for tensor in self._tensors if tensor.numel()]

    def wait(self) -> list[torch.Tensor]:
        for work in self._works:
            work.wait()
        return self._tensors


class _IncomingCrossing:
    """A boundary input on its way, its header first where it has one."""

    def __init__(
        self,
        receive: Callable[[torch.Tensor], Work],
        device: torch.device,
        declared: Crossing | None,
    ) -> None:
        self._receive = receive
        self._device = device
        self._crossing = declared
        if declared is None:
            self._header = self._empty_ints(FIRST_INTS)
            self._header_work = receive(self._header)
        else:
            self._payload = _Incoming(receive, device, declared.specs)

    def read_header(self) -> Crossing:
        """Wait for the header, where there is one, and start receiving what it announces."""
        if self._crossing is None:
            self._header_work.wait()
            ints = self._header.tolist()
            missing = missing_ints(ints)
            if missing:
                rest = self._empty_ints(missing)
                self._receive(rest).wait()
                ints += rest.tolist()
            self._crossing = decode(ints)
            self._payload = _Incoming(self._receive, self._device, self._crossing.specs)
        return self._crossing

    def wait(self) -> tuple[Crossing, list[torch.Tensor]]:
        crossing = self.read_header()
        return crossing, self._payload.wait()

    def _empty_ints(self, number: int) -> torch.Tensor:
        return torch.empty(number, dtype=torch.int64, device=self._device)


def _header_messages(crossing: Crossing, device: torch.device) -> list[torch.Tensor]:
    ints = torch.tensor(encode(crossing), dtype=torch.int64, device=device)
    return [ints[:FIRST_INTS], ints[FIRST_INTS:]]


_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CARRIED = {
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}


def _on_the_wire(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as transports take it: contiguous, without history, of a plain dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.dtype.is_complex:
        return torch.view_as_real(plain)
    if plain.dtype in _CARRIED:
        return plain.view(_CARRIERS[plain.dtype.itemsize])
    return plain
