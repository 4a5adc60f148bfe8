"""Parameters that are gathered and reduced together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainwright.sharding.data.buckets import Bucket
from trainwright.sharding.data.reducer import Reducer


class Unit:
    """The parameters of one module without those of units nested in it.

    Args:
        name: The module's name; "" is the model itself.
        module: The module that computes with them.
        buckets: What each collective of the unit moves, trained parameters or not.
        reducer: Reduces those that are trained.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        buckets: Sequence[Bucket],
        reducer: Reducer,
    ) -> None:
        self.name = name
        self.module = module
        self.buckets = tuple(buckets)
        self._cut = tuple(bucket for bucket in self.buckets if bucket.weights.is_cut)
        self._trained = tuple(bucket for bucket in self.buckets if bucket.gradients is not None)
        self._reducer = reducer

    @property
    def is_cut(self) -> bool:
        """Whether some of its weights are whole only between gathering and releasing."""
        return bool(self._cut)

    @property
    def is_gathered(self) -> bool:
        """Whether all its weights are whole and the parameters are views of them."""
        return all(bucket.weights.is_whole for bucket in self._cut)

    def gather(self) -> None:
        """Start collecting the weights, unless they are here or on their way.

        Communicates:
            Stage 3: one all-gather a bucket over the data axes, (N-1)/N of its weights' bytes.
        """
        for bucket in self._cut:
            bucket.weights.start_gathering()

    def await_weights(self) -> None:
        """Gather if nobody did, wait, and let the parameters be views of the whole weights."""
        self.gather()
        for bucket in self._cut:
            bucket.show()

    def release(self) -> None:
        """Give the whole weights back; does nothing where they are kept or already gone.

        Raises:
            LifecycleError: A parameter left the flat buffer.
        """
        for bucket in self._cut:
            bucket.release()

    def reduce(self) -> None:
        """Say that no more gradient comes to this unit in this step.

        Its reductions start as soon as those before it have: the order is the same on every rank.
        """
        self._reducer.complete(self._trained)

    def end_backward(self) -> None:
        """Say that the running backward computes with this unit no more.

        If it is the last one the unit's reductions start as those before them have, and the memory
        of older ones is freed, for which this may wait a little.
        """
        self._reducer.end_backward(self._trained)

    def __repr__(self) -> str:
        names = [member.name for bucket in self.buckets for member in bucket.members]
        return f"Unit({self.name!r}, {len(names)} parameters)"
