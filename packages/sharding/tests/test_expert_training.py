"""Steps of a model with experts are those of one process, at every stage of data parallelism."""

import functools

import pytest
import torch
from torch import nn

from trainwright.collectives import LocalWorld, random
from trainwright.sharding import (
    ColumnParallelLinear,
    Mesh,
    MeshShape,
    RowParallelLinear,
    ShardPolicy,
    by_name,
    check_replicas,
    data_parallel,
    full_state_dict,
    one_norm,
)
from trainwright.sharding.expert import MixtureOfExperts, Routing, update_expert_bias

B, S, D, F = 8, 6, 8, 4
RULE = Routing(4, 2, score="sigmoid", biased=True, capacity_factor=1.0)
LAYOUTS = [
    "dp=4,ep=4",
    "dp=2,tp=2,ep=2",
    "tp=4,ep=2,etp=2",
    "dp=2,cp=2,ep=2",
    "dp=2,tp=2,ep=4,etp=1",
]


class Block(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        tp = mesh.communicator("tp")
        options = {"dtype": torch.float64}
        self.norm = nn.LayerNorm(D, **options)
        self.up = ColumnParallelLinear(D, 2 * D, tp, bias=True, **options)
        self.down = RowParallelLinear(2 * D, D, tp, **options)
        self.mlp = MixtureOfExperts(D, F, RULE, mesh, shared_width=4, shared_gate=True, **options)

    def forward(self, hidden, valid, positions):
        hidden = hidden + self.down(self.up(self.norm(hidden)).tanh())
        output, report = self.mlp(hidden, valid, positions_S=positions)
        return hidden + output, report


class Model(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.layers = nn.ModuleList(Block(mesh) for _ in range(2))
        for index, block in enumerate(self.layers):
            for name, part in block.named_children():
                if name != "norm":
                    part.reset_parameters(random.Key(3, f"{index}.{name}"), 0.4)

    def forward(self, hidden, valid, positions):
        auxiliary = 0.0
        for block in self.layers:
            hidden, report = block(hidden, valid, positions)
            auxiliary = auxiliary + 0.05 * report.balance + 0.001 * report.z
        return hidden, auxiliary


def batch(step):
    hidden = random.normal(random.Key(0, "batch", step), (B, S, D), dtype=torch.float64)
    valid = torch.ones(B, S, dtype=torch.bool)
    valid[0, :2] = valid[5, 1:] = False
    return hidden, valid


def train(world, layout, stage=0, steps=2):
    """Return what each step has computed, and the state at its end."""
    mesh = Mesh(world, MeshShape.parse(layout))
    model = Model(mesh)
    policy = ShardPolicy(stage=stage, alignment=1, units=by_name("layers.*"))
    parallel = data_parallel(model, mesh, policy)
    parameters = [piece.parameter for piece in parallel.pieces.values()]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, eps=1e-2)
    positions = torch.arange(S).chunk(mesh.size("cp"))[mesh.coordinate("cp")]
    found = []
    for step in range(steps):
        parallel.zero_grad()
        hidden, valid = (
            whole.chunk(mesh.size("dp"))[mesh.coordinate("dp")] for whole in batch(step)
        )
        total = 0.0
        for rows, mask in zip(hidden.chunk(2), valid.chunk(2), strict=True):  # micro-batches
            output, auxiliary = model(rows[:, positions], mask[:, positions], positions)
            loss = output[mask[:, positions]].square().sum() + auxiliary
            (loss / batch(step)[1].sum()).backward()
            total += loss.item()
        parallel.reduce()
        parallel.wait()
        totals = one_norm(mesh, parallel.pieces.values(), loss_sum=total)
        optimizer.step()
        parallel.publish()
        update_expert_bias(model, mesh, 0.01)
        check_replicas(parallel)
        found.append((totals.norm.item(), totals.loss_sum.item()))
    return found, full_state_dict(parallel)


@functools.cache
def serial():
    return LocalWorld(1).run(lambda world: train(world, "dp=1"))[0]


FEW = [(LAYOUTS[0], 3), (LAYOUTS[2], 2), (LAYOUTS[3], 1), (LAYOUTS[4], 0)]
REST = [(layout, stage) for layout in LAYOUTS for stage in range(4) if (layout, stage) not in FEW]


@pytest.mark.parametrize(
    ("layout", "stage"), [*FEW, *(pytest.param(*case, marks=pytest.mark.long) for case in REST)]
)
def test_a_sparse_model_takes_the_steps_of_one_process(layout, stage):
    (expected, weights), size = serial(), MeshShape.parse(layout).world_size

    ranks = LocalWorld(size).run(lambda world: train(world, layout, stage))

    for found, state in ranks:
        assert torch.tensor(found) == pytest.approx(torch.tensor(expected), rel=1e-10)
        for name, weight in state.items():  # on one rank, with the biases of the routers
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-10, msg=name)
