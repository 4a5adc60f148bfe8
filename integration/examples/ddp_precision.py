"""A trainer of your own: PyTorch's DistributedDataParallel, in any number format.

    torchrun --nproc-per-node 2 integration/examples/ddp_precision.py --dtype float16
    python integration/examples/ddp_precision.py --dtype fp8-delayed     # one process, a quick look

Needs trainwright-precision and trainwright-collectives. Weights stay in float32: they are the
masters, their gradients are what DDP averages. The policy casts them for each product.
"""

# Shapes: B batch, S sequence, D model, V vocabulary (256 bytes).

from __future__ import annotations

import argparse
import os
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from trainwright.collectives import Communicator, TorchCommunicator, random
from trainwright.precision import PRESETS, DynamicLossScaler, LossScaler, UnitLossScaler, policy

BATCH, SEQUENCE, WIDTH, HEADS, LAYERS = 16, 64, 64, 4, 2


class Block(nn.Module):  # attention and MLP side by side
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(5 * WIDTH, WIDTH)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        normed_BSD = self.norm(hidden_BSD)
        q, k, v = self.qkv(normed_BSD).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        o_BSD = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return hidden_BSD + self.out(torch.cat((o_BSD, F.gelu(self.up(normed_BSD))), dim=-1))


class Model(nn.Module):  # without positions: the causal mask alone tells them apart
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.bytes(tokens_BS))))


def batch_of(step: int, world: Communicator, windows: Tensor) -> Tensor:
    """Return this rank's rows of a batch that does not depend on the number of ranks."""
    drawn = random.integers(random.Key(0, "rows", step), (BATCH,), 0, len(windows))
    return windows[drawn[world.rank :: world.size]].to(world.device, torch.int64)


def main(world: TorchCommunicator, steps: int, dtype: str = "bfloat16") -> list[float]:
    """Train; returns the loss of each step, the mean over all ranks."""
    if BATCH % world.size:
        raise SystemExit(
            f"{BATCH} rows do not divide over {world.size} ranks; use 1, 2, 4, 8 or 16"
        )
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, SEQUENCE + 1, 1)
    torch.manual_seed(0)
    model = Model().to(world.device)
    # The preset would keep weights in its narrow dtype; here they are the masters.
    applied = attrs.evolve(policy(dtype), parameter=torch.float32).apply(model)
    replicated = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda made: min(1.0, (made + 1) / 10))
    scaler: LossScaler = UnitLossScaler()
    if dtype == "float16":  # its gradients would vanish; all ranks skip an overflow together
        scaler = DynamicLossScaler(communicator=world, named_parameters=model.named_parameters())
    losses = []
    for step in range(1, steps + 1):
        rows = batch_of(step, world, windows)
        logits_BSV = replicated(rows[:, :-1])
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler.step(optimizer):  # False: a gradient overflowed, nothing was changed
            warmup.step()
        scaler.update()
        if applied.float8 is not None:
            applied.float8.end_step(world)
        mean = loss.detach() / world.size
        world.all_reduce(mean).wait()
        losses.append(float(mean))
        if world.rank == 0 and (step % 10 == 1 or step == steps):
            print(f"step {step:4d}  loss {losses[-1]:.3f}  scale {scaler.get_scale():g}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dtype", default="bfloat16", choices=list(PRESETS))
    options = parser.parse_args()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    main(TorchCommunicator(), options.steps, options.dtype)
    dist.destroy_process_group()
