"""An update of master weights that passes over memory once.

Comparing the model's weights with their masters, updating the masters and rounding them back are
three passes where they run one after the other. Here a piece that fits the cache goes through all
three before the next is touched.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

_PIECE = 1 << 17  # elements; four float32 arrays of these take 2 MiB
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Comparison:
    """Takes weights that were changed in the model over into their masters."""

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def take_over(self, weight: torch.Tensor, master: torch.Tensor) -> None:
        """Where the weight is no longer the rounded master, let the master be the weight.

        Args:
            weight: of 16 bits; any shape.
            master: of the same shape, wider.
        """
        if weight.device.type == "cpu" and weight.is_contiguous() and master.is_contiguous():
            pieces = _pieces(weight), _pieces(master)
            for piece, of_master in zip(*pieces, strict=True):
                self.take_over_piece(piece, of_master)
            return
        # Asking first whether all is as it was would make the host wait.
        unchanged = weight == master.to(weight.dtype)
        master.copy_(torch.where(unchanged, master, weight.to(master.dtype)))

    def take_over_piece(self, weight: torch.Tensor, master: torch.Tensor) -> None:
        """Do the same for flat tensors on the CPU that are no longer than a piece."""
        if weight.dtype not in self._scratch:
            self._scratch[weight.dtype] = torch.empty(_PIECE, dtype=weight.dtype)
        expected = self._scratch[weight.dtype][: weight.numel()]
        expected.copy_(master)
        if not _are_same_bits(weight, expected):
            master.copy_(torch.where(weight == expected, master, weight.to(master.dtype)))


@attrs.frozen(eq=False)
class _Pieces:
    """One parameter's weight, master and moments, cut; and what they were cut from."""

    weight_at: int
    state: tuple[torch.Tensor, ...]
    cut: tuple[tuple[torch.Tensor, ...], ...]

    def are_of(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> bool:
        """Whether nobody has put other tensors in their places."""
        return weight.data_ptr() == self.weight_at and all(map(operator.is_, state, self.state))


class OnePass:
    """Steps a fused Adam or AdamW of masters on the CPU, piece by piece.

    The values are those of comparing, ``inner.step()`` and rounding, bit for bit.

    Args:
        inner: the optimizer of the masters; `fits` says of which this may be made.
        weights: the model's weights, one for each master; the master itself where there is no
            other.
        masters: what ``inner`` updates.
        comparison: how weights and masters are compared.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        weights: Sequence[torch.Tensor],
        masters: Sequence[torch.Tensor],
        comparison: Comparison,
    ) -> None:
        self._inner = inner
        self._weights = dict(zip(masters, weights, strict=True))
        self._comparison = comparison
        self._pieces: dict[torch.Tensor, _Pieces] = {}

    @staticmethod
    def fits(inner: torch.optim.Optimizer, weights: Sequence[torch.Tensor]) -> bool:
        """Whether all that ``inner`` updates can be passed over in pieces."""
        return (
            type(inner) in (torch.optim.Adam, torch.optim.AdamW)
            and all(
                g["fused"] and not isinstance(g["lr"], torch.Tensor) for g in inner.param_groups
            )
            and all(
                not isinstance(beta, torch.Tensor)
                for g in inner.param_groups
                for beta in g["betas"]
            )
            and all(weight.device.type == "cpu" for weight in weights)
        )

    def step(self) -> bool:
        """Do one step of all masters that have a gradient.

        Returns:
            False, and nothing is done, where a state is still to be made, or a gradient or a
            weight put into the model has gaps.
        """
        for group in self._inner.param_groups:
            for master in group["params"]:
                gradient = master.grad
                if gradient is None:
                    continue
                if not self._inner.state.get(master) or not gradient.is_contiguous():
                    return False
                if not (self._weights[master].is_contiguous() and master.is_contiguous()):
                    return False
        for group in self._inner.param_groups:
            self._step_group(group)
        return True

    def _step_group(self, group: dict[str, Any]) -> None:
        update: Callable[..., None]
        update = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        beta1, beta2 = group["betas"]
        options = {
            "amsgrad": group["amsgrad"],
            "lr": group["lr"],
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "maximize": group["maximize"],
        }
        masters = [master for master in group["params"] if master.grad is not None]
        torch._foreach_add_([self._inner.state[master]["step"] for master in masters], 1)
        for pieces in self._bundles(masters):
            columns = [list(column) for column in zip(*pieces, strict=True)]
            steps, gradients, weights, of_masters, averages, squares, *largest = columns
            narrow = [
                (weight, master)
                for weight, master in zip(weights, of_masters, strict=True)
                if weight.dtype != master.dtype
            ]
            for weight, master in narrow:
                self._comparison.take_over_piece(weight, master)
            peaks = largest[0] if largest else []
            update(of_masters, gradients, averages, squares, peaks, steps, **options)
            for weight, master in narrow:
                weight.copy_(master)

    def _bundles(self, masters: Sequence[torch.Tensor]) -> Iterator[list[tuple[torch.Tensor, ...]]]:
        """Yield lists of pieces that fit the cache together: (step, gradient, weight, …)."""
        bundle: list[tuple[torch.Tensor, ...]] = []
        held = 0
        for master in masters:
            step = self._inner.state[master]["step"]
            assert master.grad is not None
            gradients = _pieces(master.grad)
            for gradient, rest in zip(gradients, self._cut(master), strict=True):
                if held + gradient.numel() > _PIECE and bundle:
                    yield bundle
                    bundle, held = [], 0
                bundle.append((step, gradient, *rest))
                held += gradient.numel()
        if bundle:
            yield bundle

    def _cut(self, master: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], ...]:
        state = self._inner.state[master]
        moments = tuple(state[name] for name in _MOMENTS if name in state)
        weight = self._weights[master]
        known = self._pieces.get(master)
        if known is None or not known.are_of(weight, moments):
            whole = [weight.detach(), master.detach() if weight is not master else weight.detach()]
            columns = [_pieces(tensor) for tensor in (*whole, *moments)]
            known = _Pieces(weight.data_ptr(), moments, tuple(zip(*columns, strict=True)))
            self._pieces[master] = known
        return known.cut


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor.view(-1), _PIECE)


def _are_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare flat tensors of 16 bits on the CPU; eight bytes at a time where that can be."""
    lane = torch.int16 if one.numel() % 4 or one.storage_offset() % 4 else torch.int64
    # Where all is equal, numpy compares four times as fast as torch.equal.
    return bool((one.view(lane).numpy() == other.view(lane).numpy()).all())
