"""Held-out loss, each sequence counted once in every layout."""

# Shapes: N sequences, B sequences a microbatch, S sequence.

from __future__ import annotations

import torch

from trainwright.integration.data import IGNORE
from trainwright.integration.parts import Parts
from trainwright.integration.sharded import sequence_part


def evaluate(parts: Parts, tokens_NS: torch.Tensor, labels_NS: torch.Tensor) -> float:
    """Return the mean loss in nats over the valid labels; every rank gets the same number.

    Args:
        tokens_NS: int64, the same sequences on every rank; data ranks take turns.
        labels_NS: int64, shifted; -100 does not count.

    Communicates: boundary tensors, at stage 3 the weights as they are gathered, then one float64
    all-reduce of two elements over the world.
    """
    ranks = parts.mesh.size("dp")
    rank = parts.mesh.coordinate("dp")
    rows = parts.config.sizes.micro_batch
    # Ranks make as many passes as the fullest one: sharded weights are gathered by all together.
    passes = -(-len(tokens_NS) // (ranks * rows))
    tokens, labels = _equal_parts(tokens_NS[rank::ranks], labels_NS[rank::ranks], rows, passes)
    device = parts.mesh.world.device
    part = sequence_part(parts.config, parts.mesh)
    tokens, labels, positions_S = part.take(tokens), part.take(labels), part.positions()

    def inputs(stage: int, microbatch: int) -> dict[str, torch.Tensor]:
        return {
            "tokens_BS": tokens[microbatch].to(device),
            "labels_BS": labels[microbatch].to(device),
            "positions_S": positions_S,
        }

    sums = torch.zeros(2, dtype=torch.float64, device=device)
    if passes:
        sums[0] = parts.executor.evaluate(inputs, passes).loss_sum
    sums[1] = float((labels != IGNORE).sum()) * parts.counts_tokens
    # Tensor-parallel ranks hold the same sums; the first of them speaks.
    sums *= float(parts.mesh.coordinate("tp") == 0)
    parts.mesh.world.all_reduce(sums).wait()
    return float(sums[0] / sums[1])


def _equal_parts(
    tokens_NS: torch.Tensor, labels_NS: torch.Tensor, rows: int, passes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    # Filled up with rows that do not count, so that shapes stay the same.
    missing = passes * rows - len(tokens_NS)
    padding = tokens_NS.new_zeros(missing, tokens_NS.shape[1])
    tokens = torch.cat((tokens_NS, padding))
    labels = torch.cat((labels_NS, padding + IGNORE))
    shape = (passes, rows, tokens_NS.shape[1])
    return tokens.view(shape), labels.view(shape)
