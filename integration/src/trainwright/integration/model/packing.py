"""Several documents in one sequence, which do not see each other, and where tokens stand."""

# Shapes: B batch, S sequence (of a rank, its part of it), E features of a head that are turned.

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F

from trainwright.sharding.context import Documents, attend, spans_between


class Packed:
    """The documents of one microbatch, made once for all layers.

    Layers that are recomputed get it handed on as it is: it is no container of tensors.

    Args:
        documents: Of the whole sequences.
    """

    __slots__ = ("documents",)

    def __init__(self, documents: Documents) -> None:
        self.documents = documents

    @classmethod
    def of(cls, documents_BS: torch.Tensor) -> Packed:
        """Return what integers [B, S] of whole sequences tell; negative ones are padding.

        They are read by the host: keep them on the CPU.
        """
        return cls(Documents.of(documents_BS))


@attrs.frozen(eq=False)
class Places:
    """Where the tokens of a microbatch stand: what blocks are told beside the residual stream.

    Args:
        cos: cosine of their rotary angles, [S, E], or [B, 1, S, E] where sequences differ; empty
            where positions are learned.
        sin: the sine.
        between_S: int64, the positions that this rank's residual stream has between products.
        valid_BS: of these, which are no padding; None: all.
        documents: which positions see each other; None: all up to their own.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    between_S: torch.Tensor
    valid_BS: torch.Tensor | None = None
    documents: Packed | None = None


def attend_causally(
    q_BHSE: torch.Tensor,
    k_BKSE: torch.Tensor,
    v_BKSE: torch.Tensor,
    documents: Packed | None = None,
) -> torch.Tensor:
    """Return causal attention [B, H, S, E] over whole sequences, within each document.

    Documents are blocks of a fused kernel: no mask is made, and what they do not see costs nothing.
    """
    if documents is None:
        return F.scaled_dot_product_attention(
            q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=q_BHSE.shape[1] != k_BKSE.shape[1]
        )
    known = documents.documents
    whole = ((0, known.length),)
    spans = known.memo.once(
        ("spans", whole, whole, True),
        lambda: spans_between(whole, whole, causal=True, documents=known),
    )
    return attend(q_BHSE, k_BKSE, v_BKSE, spans)[0]
