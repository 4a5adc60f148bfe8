"""Text from the model as it stands, in any layout."""

# Shapes: S sequence, D model, V vocabulary.

from __future__ import annotations

import torch
import torch.nn.functional as F

from trainwright.collectives import random
from trainwright.integration.model.blocks import at_least_float32
from trainwright.integration.parts import Parts, local_positions, whole_weights


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
    position's logits over tp, and a broadcast of one token over pp. Data ranks work alike. Stage 3:
    the weights of this pipeline stage are gathered once, or unit by unit for each byte.
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
    if parts.config.sequence_parallel:
        # Ranks have fixed parts of the positions; what follows a position does not change it.
        tokens_BS = F.pad(tokens_BS, (0, parts.config.sequence_length - tokens_BS.shape[1]))
    output = _through_stages(parts, tokens_BS)
    pipeline = parts.mesh.communicator("pp")
    chosen = torch.zeros(1, dtype=torch.int64, device=tokens_BS.device)
    if parts.stage.is_last:
        local_V = at_least_float32(output[0, last]).contiguous()
        logits_V = parts.stage.layers.join_vocabulary(local_V, parts.stage.shape.vocabulary)
        # Zero separates files and is no byte of text.
        logits_V[0] = float("-inf")
        steps = torch.softmax(logits_V.double() / temperature, 0).cumsum(0)
        key = random.Key(parts.config.seed, "sample", position)
        draw = random.uniform(key, (1,), dtype=torch.float64, device=steps.device)
        chosen = torch.searchsorted(steps, draw).clamp_(max=len(steps) - 1)
    pipeline.broadcast(chosen, pipeline.size - 1).wait()
    return int(chosen)


def _through_stages(parts: Parts, tokens_BS: torch.Tensor) -> torch.Tensor:
    pipeline = parts.mesh.communicator("pp")
    hidden_BSD = None
    if not parts.stage.is_first:
        positions = tokens_BS.shape[1]
        if parts.config.sequence_parallel:
            positions = local_positions(parts.config, parts.mesh)
        shape = (len(tokens_BS), positions, parts.stage.shape.width)
        hidden_BSD = torch.empty(shape, dtype=_compute_dtype(parts), device=tokens_BS.device)
        pipeline.recv(hidden_BSD, pipeline.rank - 1).wait()
    output: torch.Tensor = parts.stage(hidden_BSD, tokens_BS=tokens_BS)
    if not parts.stage.is_last:
        pipeline.send(output.contiguous(), pipeline.rank + 1).wait()
    return output


def _compute_dtype(parts: Parts) -> torch.dtype:
    matrices = (p.dtype for p in parts.stage.parameters() if p.dim() > 1)
    return next(matrices)
