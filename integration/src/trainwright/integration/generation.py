"""Text from the model as it stands, in any layout."""

# Shapes: S sequence, D model, V vocabulary.

from __future__ import annotations

import torch
import torch.nn.functional as F

from trainwright.collectives import random
from trainwright.integration.model import DecoderStage
from trainwright.integration.model.blocks import at_least_float32
from trainwright.integration.parts import Parts, whole_weights
from trainwright.integration.sharded import sequence_part
from trainwright.integration.stepping import local_positions


@torch.no_grad()
def generate(
    parts: Parts,
    prompt: bytes,
    num_bytes: int,
    temperature: float = 0.8,
) -> bytes:
    """Return ``num_bytes`` sampled bytes that continue ``prompt``; every rank gets the same.

    Each byte is drawn by place, from (seed, its position), so that the text does not depend on the
    layout. The context is the last ``sequence_length`` bytes; there is no cache.

    Communicates: for each byte the boundary tensors of one sequence, an all-gather of one
    position's logits over tp, a broadcast of one token over pp and its sum over cp. Data ranks
    work alike. Stage 3: the weights of this pipeline stage are gathered once, or unit by unit for
    each byte.
    """
    context = list(prompt)
    device = parts.mesh.world.device
    with whole_weights(parts):
        for position in range(num_bytes):
            window = context[-parts.config.sequence_length :]
            tokens_BS = torch.tensor([window], dtype=torch.int64, device=device)
            context.append(_next_token(parts, tokens_BS, position, temperature))
    return bytes(context[len(prompt) :])


def _next_token(parts: Parts, tokens_BS: torch.Tensor, position: int, temperature: float) -> int:
    last = tokens_BS.shape[1] - 1
    part = sequence_part(parts.config, parts.mesh)
    positions_S = torch.arange(last + 1, device=tokens_BS.device)
    if _cuts_positions(parts):
        # Ranks have fixed parts of the positions; what follows a position does not change it.
        tokens_BS = F.pad(tokens_BS, (0, parts.config.sequence_length - tokens_BS.shape[1]))
        tokens_BS, positions_S = part.take(tokens_BS), part.positions()
    output_BSV = _through_stages(parts, tokens_BS, positions_S)
    chosen = torch.zeros(1, dtype=torch.int64, device=tokens_BS.device)
    ranks = parts.executor.schedule.rank_of_stage
    here = (positions_S == last).nonzero()
    if output_BSV is not None and len(here):
        stage = parts.model.stages[len(ranks) - 1]
        local_V = at_least_float32(output_BSV[0, int(here)]).contiguous()
        logits_V = stage.layers.join_vocabulary(local_V, stage.shape.vocabulary)
        # Zero separates files and is no byte of text.
        logits_V[0] = float("-inf")
        steps = torch.softmax(logits_V.double() / temperature, 0).cumsum(0)
        key = random.Key(parts.config.seed, "sample", position)
        draw = random.uniform(key, (1,), dtype=torch.float64, device=steps.device)
        chosen = torch.searchsorted(steps, draw).clamp_(max=len(steps) - 1)
    parts.mesh.communicator("pp").broadcast(chosen, ranks[-1]).wait()
    # The context rank that has the last position has drawn; the others bring zero.
    parts.mesh.communicator("cp").all_reduce(chosen).wait()
    return int(chosen)


def _cuts_positions(parts: Parts) -> bool:
    return parts.config.sequence_parallel or parts.config.mesh.cp > 1


def _through_stages(
    parts: Parts, tokens_BS: torch.Tensor, positions_S: torch.Tensor
) -> torch.Tensor | None:
    """Run one sequence through all stages; return the logits on the rank of the last one."""
    pipeline = parts.mesh.communicator("pp")
    ranks = parts.executor.schedule.rank_of_stage
    hidden_BSD: torch.Tensor | None = None
    for number, stage in sorted(parts.model.stages.items()):
        if number > 0 and ranks[number - 1] != pipeline.rank:
            hidden_BSD = _new_hidden(parts, stage, tokens_BS)
            pipeline.recv(hidden_BSD, ranks[number - 1]).wait()
        hidden_BSD = stage(hidden_BSD, tokens_BS=tokens_BS, positions_S=positions_S)
        if stage.is_last:
            return hidden_BSD
        if ranks[number + 1] != pipeline.rank:
            assert hidden_BSD is not None
            pipeline.send(hidden_BSD.contiguous(), ranks[number + 1]).wait()
    return None


def _new_hidden(parts: Parts, stage: DecoderStage, tokens_BS: torch.Tensor) -> torch.Tensor:
    positions = tokens_BS.shape[1]
    if _cuts_positions(parts):
        positions = local_positions(parts.config, parts.mesh)
    matrices = (p.dtype for p in stage.parameters() if p.dim() > 1)
    shape = (len(tokens_BS), positions, stage.shape.width)
    return torch.empty(shape, dtype=next(matrices), device=tokens_BS.device)
