"""What the optimizer, the norm and the checkpoint get of a parameter."""

from __future__ import annotations

import attrs
from torch import nn

from trainwright.collectives import ShardSpec


@attrs.frozen(eq=False)
class Piece:
    """This rank's part of one parameter.

    Args:
        name: The parameter's name in the plain model.
        parameter: What an optimizer updates, float32 or float64: the local parameter in its shape
            at stage 0, a flat range of it from stage 1 on. Its ``grad`` is set by
            `DataParallel.wait`. Of a frozen parameter, what this rank keeps, in its own dtype.
        spec: Which elements of the global tensor these are, and on which axes they are replicated.
    """

    name: str
    parameter: nn.Parameter
    spec: ShardSpec
