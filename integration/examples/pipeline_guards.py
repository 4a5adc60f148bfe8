"""A trainer of your own: any pipeline schedule, with clipping, guards and a way back.

    torchrun --nproc-per-node 2 integration/examples/pipeline_guards.py --schedule zb-v
    python integration/examples/pipeline_guards.py --spoil 90       # two threads, a quick look

Needs trainwright-pipeline-schedules[execute], trainwright-stability-guards and
trainwright-collectives. ``--spoil N`` makes noise of a batch: the guards leave it out.
"""

# Shapes: M microbatches, B rows, S sequence, D model, V vocabulary (256 bytes).

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright import stability_guards as guards
from trainwright.collectives import Communicator, LocalWorld, TorchCommunicator, random
from trainwright.pipeline_schedules import GENERATORS, split_layers
from trainwright.pipeline_schedules.execute import PipelineExecutor

WIDTH, HEADS, LAYERS, MICROBATCHES, ROWS, SEQUENCE, TOKENS = 64, 4, 4, 8, 2, 64, 8 * 2 * 64


class Block(nn.Module):  # attention and MLP side by side
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, False)
        self.up, self.out = nn.Linear(WIDTH, 4 * WIDTH, False), nn.Linear(5 * WIDTH, WIDTH, False)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        normed_BSD = self.norm(hidden_BSD)
        q, k, v = self.qkv(normed_BSD).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        o_BSD = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return hidden_BSD + self.out(torch.cat((o_BSD, F.gelu(self.up(normed_BSD))), dim=-1))


class Batches:  # a `BatchSource`: the recovery moves it, and says what is never read again
    def __init__(self, spoil: int) -> None:
        self.position, self.last, self.left_out = 0, guards.Positions(), guards.Positions()
        text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
        self.rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, SEQUENCE + 1, 1)
        self.spoil = spoil

    def seek(self, position: int, left_out: guards.Positions) -> None:
        self.position, self.left_out = position, left_out

    def read(self) -> Tensor:
        self.last, self.position = self.left_out.draw(self.position, 1)
        key = random.Key(0, "rows", self.position)
        batch_MBS = self.rows[random.integers(key, (MICROBATCHES, ROWS), 0, len(self.rows))].long()
        return 255 - batch_MBS if self.spoil in self.last else batch_MBS


def inputs(batch_MBS: Tensor, last: int, stage: int, microbatch: int) -> dict[str, Tensor]:
    first = {"input": batch_MBS[microbatch, :, :-1]} if stage == 0 else {}
    return first | ({"labels_BS": batch_MBS[microbatch, :, 1:]} if stage == last else {})


def loss_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")


def main(world: Communicator, steps: int, schedule: str = "1f1b", spoil: int = -1) -> list[float]:
    """Train; returns the loss of each step, the same on every rank."""
    plan = GENERATORS[schedule].make(world.size, MICROBATCHES, GENERATORS[schedule].chunks or 2)
    ends = nn.Embedding(256, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, False)
    layers = nn.Sequential(ends[0], *(Block() for _ in range(LAYERS)), *ends[1:])
    for name, weight in layers.named_parameters():
        if weight.dim() > 1:  # by name: the same in any split, on any rank or thread
            weight.data = 0.06 * random.normal(random.Key(0, name), weight.shape)
    parts = split_layers(len(layers), plan.num_stages)
    mine = [stage for stage, rank in enumerate(plan.rank_of_stage) if rank == world.rank]
    stages = {stage: layers[parts[stage].start : parts[stage].stop] for stage in mine}
    model = nn.ModuleList(stages.values())
    executor = PipelineExecutor(plan, stages, world, loss=loss_sum)
    optimizer = torch.optim.AdamW(guards.decay_groups(model.named_parameters(), 0.1), lr=3e-3)
    rate = guards.as_lambda_lr(guards.warmup_cosine(1.0, min(10, steps), steps, floor=0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    kept = guards.MemorySnapshots({"model": model, "optimizer": optimizer, "rate": scheduler})
    batches, losses = Batches(spoil), []
    recovery = guards.Recovery(guards.default_guards(), kept, batches, guards.MemoryJournal())
    recovery.begin(step=0)
    for step in range(steps):
        optimizer.zero_grad()
        result = executor.step(partial(inputs, batches.read(), plan.num_stages - 1), divisor=TOKENS)
        world.all_reduce(result.loss_sum).wait()  # zero but on the rank of the last stage
        norm = guards.clip_grad_norm_(model.parameters(), 1.0, communicator=world)
        report = guards.Report(step, result.loss_sum / TOKENS, norm)
        verdict = recovery.judge(report, scheduler.last_epoch)  # the same on every rank
        if verdict is guards.Verdict.CONTINUE:
            optimizer.step()
            scheduler.step()
        recovery.stepped(step + 1, verdict)
        losses.append(report.loss)
        if world.rank == 0 and (step % 10 == 0 or recovery.reason):
            print(f"step {step:4d}  loss {report.loss:.3f}  {verdict.name}  {recovery.reason}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--schedule", default="1f1b", choices=[*GENERATORS])
    parser.add_argument("--spoil", type=int, default=-1, help="make noise of this batch")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        LocalWorld(2).run(main, options.steps, options.schedule, options.spoil)
    else:
        dist.init_process_group("gloo")
        main(TorchCommunicator(), options.steps, options.schedule, options.spoil)
        dist.destroy_process_group()
