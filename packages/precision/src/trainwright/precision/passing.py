"""An update of master weights that passes over memory once.

Comparing the model's weights with their masters, updating the masters and rounding them back are
three passes where they run one after the other. Here a piece that fits the cache goes through all
three before the next is touched.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

# Elements: four float32 arrays of these take 4 MiB, of a last-level cache. Smaller pieces would fit
# the one before it, but each costs four calls.
_PIECE = 1 << 18
_MOST_LENGTHS = 16
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Comparison:
    """Takes weights that were changed in the model over into their masters."""

    def __init__(self) -> None:
        self._expected: dict[tuple[torch.dtype, int], tuple[torch.Tensor, bytearray]] = {}

    def take_over(self, weight: torch.Tensor, master: torch.Tensor) -> None:
        """Where the weight is no longer the rounded master, let the master be the weight.

        Args:
            weight: of 16 bits; any shape.
            master: of the same shape, wider.
        """
        if weight.device.type == "cpu" and weight.is_contiguous() and master.is_contiguous():
            pieces = _pieces(weight), _pieces(master)
            for piece, of_master in zip(*pieces, strict=True):
                self.take_over_piece(piece, bytes_of(piece), of_master)
            return
        # Asking first whether all is as it was would make the host wait.
        unchanged = weight == master.to(weight.dtype)
        master.copy_(torch.where(unchanged, master, weight.to(master.dtype)))

    def take_over_piece(self, weight: torch.Tensor, held: memoryview, master: torch.Tensor) -> None:
        """Do the same for flat tensors on the CPU; ``held`` are the weight's bytes."""
        if weight.numel() == 0:
            return
        expected, its_bytes = self._expected_of(weight)
        expected.copy_(master)
        # Of two byte arrays Python asks memcmp, which costs less than any operation of tensors.
        if its_bytes != held:
            master.copy_(torch.where(weight == expected, master, weight.to(master.dtype)))

    def _expected_of(self, weight: torch.Tensor) -> tuple[torch.Tensor, bytearray]:
        """Return memory of the weight's length and dtype, and its bytes: they compare as one."""
        key = weight.dtype, weight.numel()
        if key not in self._expected:
            if len(self._expected) == _MOST_LENGTHS:
                self._expected.clear()
            its_bytes = bytearray(weight.numel() * weight.itemsize)
            self._expected[key] = torch.frombuffer(its_bytes, dtype=weight.dtype), its_bytes
        return self._expected[key]


@attrs.frozen(eq=False)
class _Piece:
    """A part of one parameter: its weight, master and moments, flat."""

    weight: torch.Tensor
    master: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    held: memoryview | None  # the weight's bytes; None where the weight is its own master


@attrs.frozen(eq=False)
class _Pieces:
    """One parameter, cut; and what it was cut from."""

    weight_at: int
    state: tuple[torch.Tensor, ...]
    cut: tuple[_Piece, ...]

    def are_of(self, weight: torch.Tensor, state: tuple[torch.Tensor, ...]) -> bool:
        """Whether nobody has put other tensors in their places."""
        return weight.data_ptr() == self.weight_at and all(map(operator.is_, state, self.state))


_Job = tuple[torch.Tensor, torch.Tensor, _Piece]  # step, gradient, what they update


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

    def step(
        self, found_inf: torch.Tensor | None = None, grad_scale: torch.Tensor | None = None
    ) -> bool:
        """Do one step of all masters that have a gradient.

        Args:
            found_inf: 0-d; where it is one, nothing is updated.
            grad_scale: what the gradients still have to be divided by.

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
            self._step_group(group, {"found_inf": found_inf, "grad_scale": grad_scale})
        return True

    def _step_group(self, group: dict[str, Any], scaling: dict[str, torch.Tensor | None]) -> None:
        update: Callable[..., None]
        update = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        beta1, beta2 = group["betas"]
        names = ("amsgrad", "lr", "weight_decay", "eps", "maximize")
        options: dict[str, Any] = {name: group[name] for name in names}
        options.update(scaling, beta1=beta1, beta2=beta2)
        masters = [master for master in group["params"] if master.grad is not None]
        steps = [self._inner.state[master]["step"] for master in masters]
        if not steps:
            return
        torch._foreach_add_(steps, 1)
        for jobs in self._bundles(masters):
            pieces = [piece for *_, piece in jobs]
            narrow = [piece for piece in pieces if piece.held is not None]
            for piece in narrow:
                assert piece.held is not None
                self._comparison.take_over_piece(piece.weight, piece.held, piece.master)
            averages, squares, peaks = _columns([piece.moments for piece in pieces])
            update(
                [piece.master for piece in pieces],
                [gradient for _, gradient, _ in jobs],
                averages,
                squares,
                peaks,
                [step for step, *_ in jobs],
                **options,
            )
            for piece in narrow:
                piece.weight.copy_(piece.master)
        if scaling["found_inf"] is not None:
            torch._foreach_sub_(steps, [scaling["found_inf"]] * len(steps))

    def _bundles(self, masters: Sequence[torch.Tensor]) -> Iterator[list[_Job]]:
        """Yield lists of pieces that fit the cache together."""
        bundle: list[_Job] = []
        held = 0
        for master in masters:
            step = self._inner.state[master]["step"]
            assert master.grad is not None
            for gradient, piece in zip(_pieces(master.grad), self._cut(master), strict=True):
                if held + gradient.numel() > _PIECE and bundle:
                    yield bundle
                    bundle, held = [], 0
                bundle.append((step, gradient, piece))
                held += gradient.numel()
        if bundle:
            yield bundle

    def _cut(self, master: torch.Tensor) -> tuple[_Piece, ...]:
        state = self._inner.state[master]
        moments = tuple(state[name] for name in _MOMENTS if name in state)
        weight = self._weights[master]
        known = self._pieces.get(master)
        if known is None or not known.are_of(weight, moments):
            own = weight is master
            weights = _pieces(weight.detach())
            masters = weights if own else _pieces(master.detach())
            parts = zip(*(_pieces(moment) for moment in moments), strict=True)
            rows = zip(weights, masters, parts, strict=True)
            cut = tuple(_Piece(*row, None if own else bytes_of(row[0])) for row in rows)
            known = _Pieces(weight.data_ptr(), moments, cut)
            self._pieces[master] = known
        return known.cut


def bytes_of(weight: torch.Tensor) -> memoryview:
    """Return the bytes of a flat tensor on the CPU, without a copy."""
    return weight.view(torch.uint8).numpy().data


def _columns(moments: Iterable[tuple[torch.Tensor, ...]]) -> list[list[torch.Tensor]]:
    """Return averages, averages of squares and, where there are any, their peaks."""
    columns = [list(column) for column in zip(*moments, strict=True)]
    return [*columns, []][:3]


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor.view(-1), _PIECE)
