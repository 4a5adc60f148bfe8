"""Whether what the optimizer made of the pieces has reached the module's weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from trainwright.sharding.data.buckets import Bucket
from trainwright.sharding.data.build import FlatModel
from trainwright.sharding.data.errors import LifecycleError, first_few

_SAMPLES = 256
"""Elements of a bucket that are looked at to see that an update was not published."""

_TRIALS = 3


class UnchangedWeightsWarning(UserWarning):
    """Several updates were published in which no weight had changed."""


class Publication:
    """Remembers a few elements of each bucket's masters as they were last published.

    Fused optimizers leave no other trace. They are compared only where a step ends without
    publishing, and all elements once after the first steps: that a host reads them stalls nothing.

    Args:
        flat: The model.
    """

    def __init__(self, flat: FlatModel) -> None:
        self._buckets: Sequence[Bucket] = flat.buckets
        # Parameters that are not themselves what the optimizer updates.
        updated = {id(piece.parameter) for piece in flat.pieces.values()}
        members = (member for bucket in flat.all_buckets for member in bucket.members)
        self._copies = [member for member in members if id(member.parameter) not in updated]
        self._seen: list[torch.Tensor] = []
        self._is_current = True
        self._num_updates = 0
        self.note()
        self._first = [_checksum(bucket) for bucket in self._buckets]

    def note(self) -> None:
        """Say that the module's weights are the masters now."""
        self._seen = [_sample(bucket) for bucket in self._buckets]
        self._is_current = True
        for member in self._copies:
            member.version = member.parameter._version

    def expect_update(self) -> None:
        """Say that the pieces have gradients, so that an optimizer may change them."""
        self._is_current = False

    def check_published(self) -> None:
        """Raise if masters have changed since they were published.

        Raises:
            LifecycleError: With parameters of the buckets that have changed.
        """
        if self._is_current:
            return
        pairs = zip(self._buckets, self._seen, strict=True)
        changed = [b.members[0].name for b, seen in pairs if not _are_equal(_sample(b), seen)]
        if changed:
            raise LifecycleError(
                f"zero_grad() after an update that was not published: {first_few(changed)} and "
                "others changed in their pieces, not in the module; call publish() after the "
                "optimizer's step"
            )

    def check_untouched(self) -> None:
        """Raise if the module's weights were changed by something other than a publication.

        Raises:
            LifecycleError: With their names.
        """
        changed = [m.name for m in self._copies if m.parameter._version != m.version]
        if changed:
            raise LifecycleError(
                f"the weights of {first_few(changed)} were changed in place, which publish() would "
                "undo; after loading or editing weights call load_masters(), and build the "
                "optimizer on pieces, not on the module's parameters"
            )

    def check_updates(self) -> None:
        """Warn where the first updates have changed nothing although there were gradients.

        Before a publication, with the gradients that led to it.
        """
        if self._num_updates >= _TRIALS or self._is_current:
            return
        self._num_updates += 1
        if self._num_updates < _TRIALS or not self._has_gradients:
            return
        pairs = zip(self._buckets, self._first, strict=True)
        if all(bool(_checksum(bucket) == first) for bucket, first in pairs):
            warnings.warn(
                f"no weight has changed in the first {_TRIALS} updates although there are "
                "gradients; build the optimizer on [p.parameter for p in parallel.pieces.values()]"
                ", not on the module's parameters, and see that its learning rate is not zero",
                UnchangedWeightsWarning,
                stacklevel=3,
            )

    @property
    def _has_gradients(self) -> bool:
        gradients = (kept.piece.parameter.grad for b in self._buckets for kept in b.kept)
        found = [gradient for gradient in gradients if gradient is not None]
        finite = all(bool(gradient.isfinite().all()) for gradient in found)
        return finite and any(bool(gradient.any()) for gradient in found)


def _sample(bucket: Bucket) -> torch.Tensor:
    masters = bucket.weights.masters.detach()
    return masters[:: max(1, masters.numel() // _SAMPLES)].clone()


def _checksum(bucket: Bucket) -> torch.Tensor:
    # Bits, not values: a sum of values may stay what it was.
    return bucket.weights.masters.detach().view(torch.uint8).sum(dtype=torch.int64)


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
