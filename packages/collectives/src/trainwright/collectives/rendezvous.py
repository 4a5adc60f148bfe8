"""The parts of torch.distributed's stores and backends that communicators rely on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from trainwright.collectives.background import within

GRACE_S = 5.0
"""What ranks that connect get beside their timeout: a store that hangs says nothing of it."""


class Store(Protocol):
    """Keys and values that all processes see."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return a value, waiting until it is there."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Count up and return the sum."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value unless another is there already, and return what is there."""
        ...


class Link(Protocol):
    """Connections between every two ranks that carry messages."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Start receiving into one tensor."""
        ...

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Start sending one tensor."""
        ...


def nest(store: Store, label: str) -> Store:
    """Return a part of the store whose keys nobody else uses."""
    prefix_store: Any = dist.PrefixStore  # type: ignore[attr-defined]
    return cast(Store, prefix_store(label, store))


def connect(store: Store, rank: int, ranks: Sequence[int], timeout_s: float) -> Link:
    """Connect the ranks by Gloo; all of them call together.

    Args:
        store: a part of a store for these ranks only.
        rank: this rank within the group.
        ranks: the group's ranks, counted in the world.
        timeout_s: how long to wait for peers, now and in every operation.

    Raises:
        TimeoutError: not all ranks came; the message names the others. Or the store hangs.
        RuntimeError: they came, but a connection failed.
    """
    what = f"rank {ranks[rank]}, connecting"
    return within(timeout_s + GRACE_S, partial(_connect, store, rank, ranks, timeout_s), what)


def _connect(store: Store, rank: int, ranks: Sequence[int], timeout_s: float) -> Link:
    store.set(f"here/{rank}", "1")
    gloo: Any = dist.ProcessGroupGloo
    try:
        return cast(Link, gloo(store, rank, len(ranks), timedelta(seconds=timeout_s)))
    except RuntimeError as error:
        missing = [world for here, world in enumerate(ranks) if not store.check([f"here/{here}"])]
        if not missing:
            raise
        raise TimeoutError(
            f"the ranks {list(ranks)} did not connect within {timeout_s} s; missing: {missing}. "
            "All of them must make the communicator"
        ) from error
