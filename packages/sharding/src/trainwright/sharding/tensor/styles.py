"""What a plan can say of a module: values, of which `parallelize` makes layers and hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import attrs

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.heads import HeadLayout


@attrs.frozen
class Column:
    """A linear layer of which each rank computes its part of the outputs.

    Args:
        cut: Of the outputs; None is equal parts, which must fit. A fused layer, as [Q; K; V], has
            `Cut.joined` of its blocks.
        gather_output: Return all outputs on every rank, as a head whose loss is not told of ranks
            needs them.
        entered: Whether the input comes from ``JoinSequence(partial_gradient=True)``, which sums
            its gradient. Inside a module with `Enter`, which does too, it need not be said.
        blocks: Where ``cut`` is None, the number of equal blocks one after the other, each of which
            is cut into equal parts by itself: 2 for [gate; up].
        unit: Where ``cut`` is None, how many neighbouring outputs stay on one rank: the size of a
            head.
    """

    cut: Cut | None = None
    gather_output: bool = False
    entered: bool = False
    blocks: int = 1
    unit: int = 1


@attrs.frozen
class Row:
    """A linear layer of which each rank computes the terms of its part of the inputs.

    Where sequences are cut, the sum leaves as this rank's positions.

    Args:
        cut: Of the inputs; None is equal parts, which must fit.
        input_is_whole: Whether the input is replicated and the layer takes its part.
        unit: As of `Column`, of the inputs.
    """

    cut: Cut | None = None
    input_is_whole: bool = False
    unit: int = 1


@attrs.frozen
class Vocab:
    """An embedding of which each rank holds its part of the vocabulary.

    Args:
        cut: Of the vocabulary; None is equal parts, which must fit.
    """

    cut: Cut | None = None


@attrs.frozen
class KeyValue:
    """A key or value projection, which the heads say how to cut, or that every rank holds it whole.

    Args:
        heads: The heads of the attention.
    """

    heads: HeadLayout

    def repeats(self, rank: int) -> tuple[int, ...] | None:
        """Return how often a rank repeats each of its heads; None where all serve equally many."""
        repeats = self.heads.repeats(rank)
        return None if len(set(repeats)) == 1 else repeats

    def groups(self) -> tuple[int, ...]:
        """Return for each rank how many query heads a head of its output serves."""
        ranks = range(self.heads.ranks)
        return tuple(1 if self.repeats(r) else self.heads.repeats(r)[0] for r in ranks)


@attrs.frozen
class Enter:
    """A module around layers cut by columns: its input goes to work of which each rank does a part.

    In the backward the gradients of the input are summed, once for all layers inside. Where
    sequences are cut, the input is gathered and the sums leave as this rank's positions. Where one
    layer alone takes the input, `Enter` may go with its `Column` or `KeyValue`, on the layer
    itself: then the sum travels while the gradient of the weight is computed.

    Args:
        argument: The position of the input among the arguments of ``forward``, or its name.
    """

    argument: int | str = 0


@attrs.frozen
class SplitSequence:
    """A module before which whole sequences are cut, where sequences are cut.

    Args:
        argument: As of `Enter`.
    """

    argument: int | str = 0


@attrs.frozen
class JoinSequence:
    """A module behind which sequences are gathered, where sequences are cut.

    Args:
        partial_gradient: Whether each rank goes on with other work, as a head cut by columns does
            (``Column(entered=True)``): the ranks' gradients are summed then, where sequences are
            not cut, too.
    """

    partial_gradient: bool = False


@attrs.frozen
class SequenceLength:
    """A module that is told the length of the whole sequence by one of its arguments.

    A rank's positions do not tell the length where it is no multiple of the ranks. It is remembered
    from `SplitSequence`; but a layer that is recomputed in the backward, after the forward of
    another sequence, or that stands on a later pipeline stage, must hear it from its caller. The
    value goes for what comes behind, too. Where the argument is not passed, nothing happens.

    Args:
        argument: Its name; a tensor, or a tuple whose first element is one.
        dim: The dim that is the whole sequence.
    """

    argument: str
    dim: int = -1


@attrs.frozen
class Norm:
    """A module whose parameters each rank applies to its positions, where sequences are cut."""


@attrs.frozen
class HeadNorm:
    """A module whose parameters each rank applies to its own heads or features.

    Its gradients are terms of a sum over the ranks, whether sequences are cut or not.
    """


@attrs.frozen
class Whole:
    """A module that every rank computes whole, on equal inputs: its gradients are equal.

    It changes nothing. A plan must say it of parameters inside a module with `Enter`, beside a
    layer whose outputs are cut and, where sequences are cut, of all that no other style speaks for.
    """


@attrs.frozen
class Dropout:
    """An `nn.Dropout` whose mask is chosen by place, the same in every layout.

    Args:
        seed: Of all masks; each module's are told apart by its name.
        in_sequence: Whether the input is this rank's positions where sequences are cut.
    """

    seed: int
    in_sequence: bool = True


@attrs.frozen
class NoDropout:
    """A module that drops values at random inside, where ranks would not agree.

    Its forward raises in training mode unless the probability is zero.

    Args:
        attribute: The module's attribute that is the probability, or a dropout module.
    """

    attribute: str


@attrs.frozen
class SetAttribute:
    """A number that a module's forward reads and that is another where it is cut.

    Args:
        name: Of the attribute, which must exist.
        values: One a rank.
    """

    name: str
    values: tuple[object, ...]

    def __attrs_post_init__(self) -> None:
        if not self.values:
            raise ShardingError(f"SetAttribute({self.name!r}) needs one value a rank, got none")


Style: TypeAlias = (
    Column
    | Row
    | Vocab
    | KeyValue
    | Enter
    | SplitSequence
    | JoinSequence
    | SequenceLength
    | Norm
    | HeadNorm
    | Whole
    | Dropout
    | NoDropout
    | SetAttribute
)
"""What a plan says of a module."""

Plan: TypeAlias = Mapping[str, Style | Iterable[Style]]
"""Styles by name pattern; ``*`` stands for part of one dotted level."""
