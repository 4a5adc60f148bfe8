"""The words of a schedule: kinds of action, and one action as a readable view of a row."""

from __future__ import annotations

import enum
import re

import attrs

from trainwright.pipeline_schedules.errors import ScheduleError

NO_MICROBATCH = -1
"""What stands in the microbatch column of actions that concern a whole stage."""


class Kind(enum.IntEnum):
    """What an action does; the number is what the packed rows hold.

    Every action belongs to the rank that runs it and names a stage of that rank: ``SEND_F`` of
    stage s goes to the rank of stage s+1, ``RECV_F`` of stage s comes from the rank of stage s-1,
    ``SEND_B`` of stage s goes to the rank of stage s-1, ``RECV_B`` of stage s comes from the rank
    of stage s+1. ``B`` is the whole backward; ``I`` (gradient of the stage's input) and ``W``
    (gradient of its weights) are its two halves. ``F_PAIRED`` is a forward that overlaps with the
    B or I in the row below it; the two run as one block. ``GATHER`` makes a stage's weights whole,
    which data-parallel ranks share out, ``RELEASE`` gives up all but this rank's part; ``REDUCE``
    adds gradients over those ranks.
    """

    F = 0
    B = 1
    I = 2  # noqa: E741  (the literature's letter)
    W = 3
    F_PAIRED = 4
    SEND_F = 5
    RECV_F = 6
    SEND_B = 7
    RECV_B = 8
    REDUCE = 9
    GATHER = 10
    RELEASE = 11


COMPUTE_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.F_PAIRED)
"""The kinds that take the device's time in a simulation."""

FORWARD_KINDS = (Kind.F, Kind.F_PAIRED)
"""The kinds that run a stage forward."""

BACKWARD_KINDS = (Kind.B, Kind.I)
"""The kinds that make the gradient of a stage's input."""

WEIGHT_KINDS = (*FORWARD_KINDS, *BACKWARD_KINDS)
"""The kinds that read weights, which therefore stand between GATHER and RELEASE.

W multiplies what I left; where activations are recomputed, I does that.
"""

SEND_KINDS = (Kind.SEND_F, Kind.SEND_B)
"""The kinds that send a boundary tensor or its gradient."""

RECV_KINDS = (Kind.RECV_F, Kind.RECV_B)
"""The kinds that receive a boundary tensor or its gradient."""

STAGE_KINDS = (Kind.REDUCE, Kind.GATHER, Kind.RELEASE)
"""The kinds that concern a whole stage and no single microbatch."""

_TORCH_WORDS = {Kind.REDUCE: "REDUCE_GRAD", Kind.GATHER: "UNSHARD", Kind.RELEASE: "RESHARD"}
_KIND_OF_WORD = {kind.name: kind for kind in Kind if kind not in _TORCH_WORDS} | {
    word: kind for kind, word in _TORCH_WORDS.items()
}
# Python refuses to read a number of thousands of digits; no schedule has one of nineteen.
_NOTATION = re.compile(r"(?P<stage>\d{1,18})(?P<word>[A-Z_]+)(?P<microbatch>\d{0,18})", re.ASCII)


@attrs.frozen(order=False)
class Action:
    """One thing a rank does: ``Action(Kind.F, stage=1, microbatch=3)``, printed ``1F3``.

    The printed form is the notation of ``torch.distributed.pipelining``.
    """

    kind: Kind = attrs.field(converter=Kind)
    stage: int = attrs.field(converter=int)
    microbatch: int = attrs.field(default=NO_MICROBATCH, converter=int)

    def __str__(self) -> str:
        number = "" if self.microbatch == NO_MICROBATCH else str(self.microbatch)
        return f"{self.stage}{_TORCH_WORDS.get(self.kind, self.kind.name)}{number}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action in the notation that `str` writes, such as ``0F0`` or ``1RECV_B3``.

        Raises:
            ScheduleError: The text is not an action.
        """
        match = _NOTATION.fullmatch(text.strip())
        kind = None if match is None else _KIND_OF_WORD.get(match["word"])
        if match is None or kind is None:
            known = ", ".join(sorted(_KIND_OF_WORD))
            raise ScheduleError(
                f"{text!r} is not an action; write stage, kind, microbatch, as in 0F0 or "
                f"1RECV_B3, with a kind among {known}"
            )
        if (match["microbatch"] == "") != (kind in STAGE_KINDS):
            rule = "takes no microbatch" if kind in STAGE_KINDS else "needs a microbatch"
            raise ScheduleError(f"{text!r} is not an action; {match['word']} {rule}")
        return cls(kind, int(match["stage"]), int(match["microbatch"] or NO_MICROBATCH))
