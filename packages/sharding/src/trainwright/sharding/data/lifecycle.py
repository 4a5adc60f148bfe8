"""The lifecycle of a data-parallel step, whatever the stage."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from trainwright.sharding.data.agreed_steps import AgreedSteps, Check
from trainwright.sharding.data.build import FlatModel
from trainwright.sharding.data.driving import UnitDriver
from trainwright.sharding.data.errors import LifecycleError, first_few
from trainwright.sharding.data.layout import GroupLayout
from trainwright.sharding.data.piece import Piece
from trainwright.sharding.data.publication import Publication
from trainwright.sharding.data.reducer import Phase, Reducer
from trainwright.sharding.data.unit import Unit
from trainwright.sharding.mesh import Mesh


class DataParallel:
    """A module whose gradients are summed over the data-parallel ranks, made by `data_parallel`.

    One step: ``zero_grad()``; for each micro-batch forward and backward, with ``last_backward()``
    before the last backward; ``reduce()``; ``wait()``; the optimizer; ``publish()``.

    Every rank reduces every bucket once a step in one fixed order, whatever its backward used: a
    parameter without gradient contributes zeros. Sums are never divided.

    At stage 3 a unit's weights are whole only between gathering and releasing, which hooks on its
    module do, or the caller (``data_parallel(hooks=False)``) through `gather`, `await_weights` and
    `release`. While released, parameters are NaN of their shape; what autograd saved of whole
    weights is right again after the next gathering.
    """

    def __init__(
        self,
        module: nn.Module,
        flat: FlatModel,
        mesh: Mesh,
        units: Mapping[str, Unit],
        *,
        reducer: Reducer,
        driver: UnitDriver,
        check: Check,
    ) -> None:
        self._module = module
        self._flat = flat
        self._mesh = mesh
        self._units = units
        self._reducer = reducer
        self._driver = driver
        self._agreed = AgreedSteps(driver, reducer, check)
        self._publication = Publication(flat)
        self._num_reduced = 0

    @property
    def module(self) -> nn.Module:
        """The module that was given, with its own names."""
        return self._module

    @property
    def mesh(self) -> Mesh:
        """The ranks that share its states."""
        return self._mesh

    @property
    def pieces(self) -> dict[str, Piece]:
        """This rank's part of each trainable parameter, for the optimizer, norm and checkpoint.

        Names are the plain model's, in the order of registration; what this rank keeps nothing of
        is absent.
        """
        return dict(self._flat.pieces)

    @property
    def frozen(self) -> dict[str, Piece]:
        """This rank's part of each other parameter, for the checkpoint: whole below stage 3."""
        return dict(self._flat.frozen)

    @property
    def layout(self) -> tuple[GroupLayout, ...]:
        """Where each parameter lies in the flat buffers."""
        return self._flat.layout

    @property
    def units(self) -> Mapping[str, Unit]:
        """What is gathered together, by the module's name, outer units first."""
        return MappingProxyType(self._units)

    def gather(self) -> None:
        """Start collecting the weights of all units; only without hooks, or between steps.

        Communicates:
            Stage 3: one all-gather a bucket over the data axes, (N-1)/N of its weights' bytes.
        """
        self._driver.end_pass()
        for unit in self._units.values():
            unit.gather()

    def await_weights(self) -> None:
        """Wait until the weights of all units are whole, gathering what was not."""
        self.gather()
        for unit in self._units.values():
            unit.await_weights()

    def release(self) -> None:
        """Give whole weights back at stage 3; parameters are NaN until gathered again."""
        self._driver.end_pass()
        for unit in self._units.values():
            unit.release()

    def relearn_order(self) -> None:
        """Learn anew in which order units are gathered; on all ranks together, between steps."""
        self._driver.relearn_order()

    def zero_grad(self, *, discard: bool = False) -> None:
        """Begin a step: forget all gradients.

        Args:
            discard: Drop gradients that were accumulated but never reduced, as after an exception
                on one rank. On all ranks alike, before any of them has updated its pieces: they
                join each other's passes and reductions here. At stage 3 under hooks no rank may
                have begun a later forward, or a second backward through one, than where another
                broke off; under a schedule broken off nothing is joined.

        Raises:
            LifecycleError: A reduction is in flight, gradients would be lost, or pieces were
                updated and not published; with ``discard`` gradients are dropped even then.

        Communicates:
            With ``discard`` what `reduce` and `wait` would.
        """
        if self._reducer.in_flight and not discard:
            raise LifecycleError(
                "zero_grad() while gradients are being reduced; call reduce() and wait() first, or "
                "after an exception zero_grad(discard=True) on all ranks"
            )
        if self._has_unreduced and not discard:
            raise LifecycleError(
                "zero_grad() would drop gradients that were accumulated but not reduced; call "
                "reduce() and wait() after the last backward, or zero_grad(discard=True)"
            )
        if discard:
            self._agreed.join_broken()
        else:
            self._publication.check_published()
            self._reducer.disarm()
            self._driver.begin_step()
        self._reducer.begin()
        self._agreed.begin()
        for parameter in self._flat.settled.values():
            parameter.grad = None
        if discard:
            self._publication.check_published()

    def last_backward(self) -> None:
        """Say that the next backward is the last of this step.

        During it a bucket's reduction starts as soon as all its gradients are complete and the
        buckets before it have started. Without this call everything starts in `reduce`; leave it
        out where weight gradients are written by something other than autograd's backward.

        At stages 2 and 3 that backward also frees the gradients of older buckets once they are
        reduced, for which it waits for up to half a second; then they stay until `wait`. So it is
        best said on all ranks of the step, or on none.

        Raises:
            LifecycleError: The gradients of this step were already reduced.
        """
        self._reducer.arm()

    def reduce(self) -> None:
        """Start the reductions that have not started; every rank calls it, also without backward.

        With ``reduce_each_backward`` and without hooks every call reduces what came since the one
        before, so that it is called after each micro-batch, on all data ranks alike.

        Raises:
            LifecycleError: A parameter was replaced, moved, frozen, unfrozen or added; with
                ``missing_gradients="error"`` also, on every rank, where one has no gradient; at
                stage 3 under hooks also, on every rank, where they ran different passes.

        Communicates:
            One all-reduce a bucket (stage 0: 2 (N-1)/N of its bytes a rank), or one reduce-scatter
            (from stage 1 on: (N-1)/N), over the data axes of its group. With
            ``missing_gradients="error"`` or ``reduce_each_backward`` under hooks also one
            all-reduce of 8 bytes, whose result the host reads. At stage 3 under hooks also the
            gathers of backwards that only others ran, and one all-reduce of 16 bytes.
        """
        if self._reducer.phase is not Phase.ACCUMULATING:
            return
        self._driver.catch_up()
        # Where others may wait for this rank's part of a reduction they compare after it.
        if not self._agreed.compares_later:
            self._agreed.compare()
        self._flat.check_intact()
        self._num_reduced += 1
        if self._num_reduced & (self._num_reduced - 1) == 0:  # seldom, and again and again
            self._flat.check_complete(self._module)
        self._agreed.check()
        self._reducer.start_all()
        if self._agreed.compares_later:
            self._agreed.compare()

    def wait(self) -> None:
        """Finish the reductions and set the ``grad`` of every piece.

        Raises:
            LifecycleError: `reduce` was not called, or a gradient was replaced since.

        Communicates:
            One all-reduce of the kept range of a bucket for each further axis that its gradients
            are partial on (tp; pp of a tied weight), and over dp_replicate where dp is split.
        """
        if self._reducer.phase is Phase.REDUCED:
            return
        if not self._reducer.can_wait:
            raise LifecycleError("wait() before reduce(); call reduce() after the last backward")
        self._reducer.finish()
        self._publication.expect_update()

    def publish(self) -> None:
        """Make the module's weights equal to the pieces, on every rank.

        At stage 3 this drops gathered weights; the next gathering sees the new ones.

        Raises:
            LifecycleError: Gradients are in flight or were never reduced, or the module's weights
                were changed by something other than the pieces.

        Communicates:
            Stages 1 and 2: one all-gather a bucket over the data axes, (N-1)/N of its weights'
            bytes. Weights that travel as codes: one all-reduce of 4 bytes a parameter over the
            ranks that hold parts of it.
        """
        self._check_publishable()
        self._publication.check_updates()
        self.release()
        with torch.no_grad():
            for bucket in self._flat.all_buckets:
                bucket.weights.start_publishing()
            self._flat.encode()
            for bucket in self._flat.all_buckets:
                bucket.weights.finish_publishing()
        self._publication.note()

    def load_masters(self) -> None:
        """Take the module's weights as they are now for the pieces, after they were changed.

        Weights that were moved out of the flat buffer in the same dtype are copied back. At stage 3
        gather the weights before changing them; what is not gathered cannot have changed.

        Raises:
            LifecycleError: Gradients are in flight, or a parameter was replaced or converted.

        Communicates:
            Weights that travel as codes: as `publish`.
        """
        if self._reducer.in_flight:
            raise LifecycleError(
                "load_masters() while gradients are being reduced; call wait() first"
            )
        self._driver.end_pass()
        whole = [bucket for bucket in self._flat.all_buckets if bucket.weights.is_whole]
        released = (bucket for bucket in self._flat.all_buckets if not bucket.weights.is_whole)
        lost = [m.name for b in released for m in b.members if m.parameter._version != m.version]
        if lost:  # what has a single element can be written
            raise LifecycleError(
                f"{first_few(lost)} were changed while released, which would be lost; call "
                "await_weights() on all ranks, change them again, then load_masters()"
            )
        for bucket in whole:
            for member in bucket.members:
                member.return_weight()
        self._flat.check_intact()
        self._flat.check_complete(self._module)
        with torch.no_grad():
            for bucket in whole:
                bucket.weights.load_masters()
            self._flat.encode()
        self._publication.note()

    def _check_publishable(self) -> None:
        if self._reducer.in_flight:
            raise LifecycleError("publish() while gradients are being reduced; call wait() first")
        if self._has_unreduced:
            raise LifecycleError(
                "publish() with gradients that were not reduced; call reduce() and wait() before "
                "the optimizer, or zero_grad(discard=True) to drop them"
            )
        self._publication.check_untouched()

    @property
    def _has_unreduced(self) -> bool:
        return self._reducer.phase is Phase.ACCUMULATING and self._reducer.touched
