"""Whole computations through differentiable collectives against the same in one process."""

import pytest
import torch
import torch.nn.functional as F

from trainwright.collectives.differentiable import (
    all_gather,
    partial_to_replicate,
    partial_to_shard,
    replicate_to_partial,
    replicate_to_shard,
    shard_to_partial,
    shard_to_replicate,
)
from trainwright.collectives.local_world import LocalWorld

B, D, H = 4, 6, 8  # batch, model and hidden sizes


def run(size, fn, *args):
    return LocalWorld(size, timeout_s=20.0).run(fn, *args)


def whole_numbers(seed, shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).double()


def two_layers(size):
    """Weights, an input, a target and the one-process gradients of a two-layer network's loss."""
    generator = torch.Generator().manual_seed(size)

    def draw(*shape):
        tensor = torch.randn(shape, dtype=torch.float64, generator=generator)
        return tensor.requires_grad_()

    hidden_BD, up_HD, down_DH = draw(B, D), draw(H, D), draw(D, H)
    target_BD = draw(B, D).detach()
    output_BD = hidden_BD.tanh() + F.gelu(hidden_BD.tanh() @ up_HD.T) @ down_DH.T
    loss = (output_BD - target_BD).pow(4).sum()
    gradients = torch.autograd.grad(loss, (hidden_BD, up_HD, down_DH))
    return (hidden_BD, up_HD, down_DH, target_BD), loss.detach(), gradients


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def own(tensor, comm, dim):
    return tensor.detach().chunk(comm.size, dim)[comm.rank].clone().requires_grad_()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_tensor_parallel_network_has_the_serial_loss_and_gradients(size):
    (hidden_BD, up_HD, down_DH, target_BD), loss, gradients = two_layers(size)

    def body(comm):
        x_BD = hidden_BD.detach().clone().requires_grad_()
        up, down = own(up_HD, comm, 0), own(down_DH, comm, 1)
        residual_BD = x_BD.tanh()
        middle = F.gelu(replicate_to_partial(residual_BD, comm) @ up.T)
        output_BD = residual_BD + partial_to_replicate(middle @ down.T, comm)
        own_loss = (output_BD - target_BD).pow(4).sum()
        own_loss.backward()
        return own_loss.detach(), x_BD.grad, up.grad, down.grad

    losses, inputs, ups, downs = zip(*run(size, body), strict=True)

    for rank in range(size):
        close(losses[rank], loss)
        close(inputs[rank], gradients[0])
    close(torch.cat(ups), gradients[1])
    close(torch.cat(downs, 1), gradients[2])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sequence_parallel_network_has_the_serial_loss_and_gradients(size):
    (hidden_BD, up_HD, down_DH, target_BD), loss, gradients = two_layers(size)

    def body(comm):
        x_BD = hidden_BD.detach().clone().requires_grad_()
        up, down = own(up_HD, comm, 0), own(down_DH, comm, 1)
        part = replicate_to_shard(x_BD, comm, 0).tanh()
        middle = F.gelu(shard_to_partial(part, comm, 0) @ up.T)
        part = part + partial_to_shard(middle @ down.T, comm, 0)
        output_BD = shard_to_replicate(part, comm, 0)
        own_loss = (output_BD - target_BD).pow(4).sum()
        own_loss.backward()
        return own_loss.detach(), x_BD.grad, up.grad, down.grad

    losses, inputs, ups, downs = zip(*run(size, body), strict=True)

    for rank in range(size):
        close(losses[rank], loss)
        close(inputs[rank], gradients[0])
    close(torch.cat(ups), gradients[1])
    close(torch.cat(downs, 1), gradients[2])


def test_gradients_of_gradients_go_through():
    def losses(x, gathered):
        first = (x.square() * gathered.sum()).sum()
        return first + gathered.pow(3).sum()

    xs = [whole_numbers(rank, (3,)).requires_grad_() for rank in range(2)]
    serial = sum(losses(x, torch.cat(xs)) for x in xs)
    serial_first = torch.autograd.grad(serial, xs, create_graph=True)
    serial_second = torch.autograd.grad(sum(g.square().sum() for g in serial_first), xs)

    def body(comm):
        x = xs[comm.rank].detach().requires_grad_()
        loss = losses(x, all_gather(x, comm))
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return first.detach(), second

    first, second = zip(*run(2, body), strict=True)

    close(first, tuple(g.detach() for g in serial_first))
    close(second, serial_second)
