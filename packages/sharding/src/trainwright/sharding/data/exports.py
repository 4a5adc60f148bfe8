"""Keeps a module's own ``state_dict()``, and copies of it, from passing on released weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trainwright.sharding.data.buckets import Bucket
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.members import Member


def guard_exports(buckets: Iterable[Bucket]) -> None:
    """Let ``state_dict()`` and ``copy.deepcopy()`` raise where a weight in them is released.

    What ``state_dict()`` gives of gathered weights is copied, so that it outlives their release.
    """
    for bucket in buckets:
        for member in bucket.members if bucket.weights.is_cut else ():
            for module, attribute in member.owners:
                guard = _Guard(bucket, member, attribute)
                module.register_state_dict_post_hook(guard)  # type: ignore[no-untyped-call]


class _Guard:
    """A hook of the module that holds a cut parameter."""

    def __init__(self, bucket: Bucket, member: Member, attribute: str) -> None:
        self._bucket = bucket
        self._member = member
        self._attribute = attribute

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object
    ) -> None:
        name = prefix + self._attribute
        found = state.get(name)
        if isinstance(found, torch.Tensor):
            self._check("state_dict()")
            if found is not self._member.parameter:  # with keep_vars=True it is
                state[name] = found.clone()

    def __deepcopy__(self, memo: object) -> _NoGuard:
        self._check("a copy")
        return _NoGuard()

    def _check(self, what: str) -> None:
        if not self._bucket.weights.is_whole:
            raise LifecycleError(
                f"{what} of the module would hold NaN for {self._member.name}, which is released; "
                "use full_state_dict() or piece_state_dict(), or call await_weights() before and "
                "release() after it, on all ranks"
            )


class _NoGuard:
    """Stands in a copy, whose weights are its own."""

    def __call__(self, module: nn.Module, state: object, prefix: str, metadata: object) -> None:
        """Do nothing."""
