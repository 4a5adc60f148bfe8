"""Held-out loss, each sequence counted once in every layout."""

# Shapes: N sequences, M passes, B sequences a pass, S sequence.

from __future__ import annotations

import math

import attrs
import numpy as np
import torch

from trainwright.integration.data import IGNORE, Data, Rows, Tokenizer
from trainwright.integration.data.shifting import ordinals_of
from trainwright.integration.model_parts import ModelParts
from trainwright.integration.sequence_part import SequencePart
from trainwright.integration.sharded import sequence_part


@attrs.frozen
class TokenLosses:
    """Losses of many tokens; those of several sets of sequences add up.

    Args:
        loss_sum: in nats.
        tokens: how many they are.
    """

    loss_sum: float = 0.0
    tokens: int = 0

    @property
    def mean(self) -> float:
        """Nats a token; not a number where there is none."""
        return self.loss_sum / self.tokens if self.tokens else float("nan")

    def __add__(self, other: TokenLosses) -> TokenLosses:
        return TokenLosses(self.loss_sum + other.loss_sum, self.tokens + other.tokens)


def held_out_rows(parts: ModelParts, data: Data) -> Rows:
    """Return the rows of what is held out that a run is measured with."""
    config = parts.config
    return data.held_out_rows(config.batch.sequence_length, config.evaluation.evaluate_sequences)


def bytes_of(labels_NS: torch.Tensor, tokenizer: Tokenizer) -> int | None:
    """Return how many bytes of text labels stand for; None where nobody knows.

    Args:
        labels_NS: int64; `IGNORE` does not count.
        tokenizer: of the labels.
    """
    sizes = tokenizer.sizes()
    if sizes is None:
        return None
    return int(sizes[labels_NS[labels_NS != IGNORE].numpy()].sum())


def bits_a_byte(losses: TokenLosses, num_bytes: int | None) -> float | None:
    """Return losses by the bytes of text that the tokens stand for; None where none are known."""
    return losses.loss_sum / math.log(2.0) / num_bytes if num_bytes else None


def evaluate(
    parts: ModelParts,
    tokens_NS: torch.Tensor,
    labels_NS: torch.Tensor,
    documents_NS: torch.Tensor | None = None,
) -> float:
    """Return the mean loss in nats over the valid labels; see `token_losses`."""
    return token_losses(parts, tokens_NS, labels_NS, documents_NS).mean


def token_losses(
    parts: ModelParts,
    tokens_NS: torch.Tensor,
    labels_NS: torch.Tensor,
    documents_NS: torch.Tensor | None = None,
) -> TokenLosses:
    """Return the losses of the valid labels; every rank gets the same.

    Args:
        parts: the model; its weights, gradients and modes stay as they are.
        tokens_NS: int64, the same sequences on every rank; data ranks take turns.
        labels_NS: int64, shifted; -100 does not count.
        documents_NS: int64, which document each token is of, negative for padding; None: each
            sequence is one.

    Communicates: boundary tensors, at stage 3 the weights as they are gathered, then one float64
    all-reduce of two elements over the world.
    """
    ranks, rank = parts.mesh.size("dp"), parts.mesh.coordinate("dp")
    rows = parts.config.sizes.micro_batch
    # Ranks make as many passes as the fullest one: sharded weights are gathered by all together.
    passes = -(-len(tokens_NS) // (ranks * rows))
    part = sequence_part(parts.config, parts.mesh)
    device = parts.mesh.world.device
    shape = (passes, rows, tokens_NS.shape[1])
    # Filled up with rows that do not count, so that shapes stay the same.
    tokens = _filled(tokens_NS[rank::ranks], shape, 0)
    labels = _filled(labels_NS[rank::ranks], shape, IGNORE)
    tokens, labels, positions_S = part.take(tokens), part.take(labels), part.positions()
    documents_MBS = ordinals = None
    if documents_NS is not None:
        documents_MBS = _filled(documents_NS[rank::ranks], shape, 0)
        ordinals = _ordinals(documents_MBS, part)

    def inputs(stage: int, microbatch: int) -> dict[str, torch.Tensor]:
        found = {
            "tokens_BS": tokens[microbatch].to(device),
            "labels_BS": labels[microbatch].to(device),
            "positions_S": positions_S,
        }
        if documents_MBS is not None and ordinals is not None:
            found["documents_BS"] = documents_MBS[microbatch]
            found["ordinals_BS"] = ordinals[microbatch].to(device)
        return found

    sums = torch.zeros(2, dtype=torch.float64, device=device)
    if passes:
        sums[0] = parts.executor.evaluate(inputs, passes).loss_sum
    sums[1] = float((labels != IGNORE).sum()) * parts.counts_tokens
    # Tensor-parallel ranks hold the same sums; the first of them speaks.
    sums *= float(parts.mesh.coordinate("tp") == 0)
    parts.mesh.world.all_reduce(sums).wait()
    return TokenLosses(float(sums[0]), int(sums[1]))


def _filled(mine_NS: torch.Tensor, shape: tuple[int, int, int], value: int) -> torch.Tensor:
    passes, rows, length = shape
    padding = mine_NS.new_full((passes * rows - len(mine_NS), length), value)
    return torch.cat((mine_NS, padding)).view(shape)


def _ordinals(documents_MBS: torch.Tensor, part: SequencePart) -> torch.Tensor:
    rows = [ordinals_of(row) for row in documents_MBS.flatten(0, 1).numpy()]
    whole = torch.from_numpy(np.stack(rows)) if rows else documents_MBS
    return part.take(whole.view(documents_MBS.shape))
