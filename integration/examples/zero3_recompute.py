"""A trainer of your own: ZeRO stage 3, recomputed activations, checkpoints for any number of ranks.

    torchrun --nproc-per-node 2 integration/examples/zero3_recompute.py --folder run --steps 60
    torchrun --nproc-per-node 3 integration/examples/zero3_recompute.py --folder run --steps 120
    python integration/examples/zero3_recompute.py                # two threads, a quick look

Needs trainwright-sharding, trainwright-checkpointing and trainwright-collectives. Each rank keeps
its part of weights, gradients and moments; a block's weights are whole while the block computes.
"""

# Shapes: B batch, S sequence, D model, V vocabulary (256 bytes).

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright.checkpointing import Sharded, StateStore, recompute_every
from trainwright.collectives import Communicator, LocalWorld, TorchCommunicator, random
from trainwright.sharding import Mesh, MeshShape, ShardPolicy, data_parallel, one_norm
from trainwright.sharding.data import by_class, seeded_reset

BATCH, SEQUENCE, WIDTH, HEADS, LAYERS, SAVE_EVERY = 12, 64, 64, 4, 4, 20


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
        self.bytes, self.blocks = nn.Embedding(256, WIDTH), nn.ModuleList()
        self.blocks.extend(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.run = recompute_every(1)  # keeps the input of each block and nothing else

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.head(self.norm(self.run(self.blocks, self.bytes(tokens_BS))))


def batch_of(step: int, world: Communicator, windows: Tensor) -> Tensor:
    """Return this rank's rows of a batch that does not depend on the number of ranks."""
    drawn = random.integers(random.Key(0, "rows", step), (BATCH,), 0, len(windows))
    return windows[drawn[world.rank :: world.size]].to(world.device, torch.int64)


def main(world: Communicator, steps: int, folder: str | None = None) -> list[float]:
    """Train, from the newest checkpoint in ``folder`` on; returns the loss of each step made."""
    if BATCH % world.size:
        raise SystemExit(f"{BATCH} rows do not divide over {world.size} ranks; use 1, 2, 3, 4 or 6")
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, SEQUENCE + 1, 1)
    mesh = Mesh(world, MeshShape(dp=world.size))
    with torch.device("meta"):  # no rank ever holds the whole model
        model = Model()
    zero = ShardPolicy(stage=3, units=by_class(Block))
    parallel = data_parallel(model, mesh, zero, initialize=seeded_reset(0))
    pieces = parallel.pieces  # of each parameter, by name, what this rank keeps
    optimizer = torch.optim.AdamW([piece.parameter for piece in pieces.values()], lr=2e-3)
    tree = {}
    for name, piece in pieces.items():  # with the moments that AdamW would make at its first step
        kept = {moment: torch.zeros_like(piece.parameter) for moment in ("exp_avg", "exp_avg_sq")}
        optimizer.state[piece.parameter] = {"step": torch.tensor(0.0), **kept}
        kept["weight"] = piece.parameter.detach()
        tree[name] = {key: Sharded(tensor, piece.spec) for key, tensor in kept.items()}
    store = StateStore(folder, world, coordinates=mesh.coordinates, keep=2) if folder else None
    begin, losses = 0, []
    if store and store.latest() is not None:  # of another number of ranks, perhaps
        begin = store.load({"step": None, "pieces": tree})["step"]
        for state in optimizer.state.values():
            state["step"].fill_(begin)
        parallel.publish()
    for step in range(begin + 1, steps + 1):
        rows = batch_of(step, world, windows)
        parallel.zero_grad()
        parallel.last_backward()  # reductions start during the next backward
        logits_BSV = model(rows[:, :-1])
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        (loss / (BATCH * SEQUENCE)).backward()  # divided once: ranks are summed
        parallel.reduce()
        parallel.wait()
        totals = one_norm(mesh, pieces.values(), loss_sum=loss.detach(), tokens=rows[:, 1:].numel())
        optimizer.step()
        parallel.publish()
        losses.append(float(totals.loss_sum / totals.tokens))
        if store and (step % SAVE_EVERY == 0 or step == steps):
            store.save(step, {"step": step, "pieces": tree})
        if world.rank == 0 and (step % 10 == 1 or step == steps):
            print(f"step {step:4d}  loss {losses[-1]:.3f}  norm {float(totals.norm):.2f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", help="of checkpoints; the newest one there is continued")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        LocalWorld(2).run(main, options.steps, options.folder)
    else:
        dist.init_process_group("gloo")
        main(TorchCommunicator(), options.steps, options.folder)
        dist.destroy_process_group()
