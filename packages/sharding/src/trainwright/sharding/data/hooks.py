"""Gathers and releases units by hooks on their modules: stage 3 outside pipelines."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from trainwright.collectives import Communicator
from trainwright.sharding.data.graph import copy_aliases, next_number, nodes_since, number_of
from trainwright.sharding.data.order import GatherOrder, GatherOrderWarning
from trainwright.sharding.data.pace import Pace
from trainwright.sharding.data.passes import Call, DrivenUnit, Pass
from trainwright.sharding.data.side_outputs import SideOutputs
from trainwright.sharding.data.uses import Uses

_OUTSIDE = -1


class HookDriver:
    """Lets a unit's weights be there while its module computes.

    A unit is gathered before its forward and, in a backward, before the first node that its
    forward made runs. It is released after its forward, and in a backward as soon as an older
    unit's nodes run, when all of its own have. The next units of the learned order are gathered
    ahead. Units that are run again during a backward (checkpointing) stay until their backward.

    At most ``live_units`` units are gathered at once for being computed or ahead of that. On top
    come those that enclose the one that computes, and those that a checkpoint runs again together.

    Args:
        units: Outer ones before those inside of them, on all ranks alike.
        root: The module whose forward is a pass.
        agree: Joins the ranks that gather together; used while an order is learned, only by this.
        live_units: At least 1.
        release_after_forward: False keeps what a forward gathered until its backward is over.
    """

    def __init__(
        self,
        units: Sequence[DrivenUnit],
        root: nn.Module,
        agree: Communicator,
        live_units: int = 2,
        release_after_forward: bool = True,
    ) -> None:
        self._units = units
        self._pace = Pace(agree)
        self._order = GatherOrder(units, agree, live_units, self._pace)
        self._keep = not release_after_forward
        self._side_outputs = SideOutputs()
        self._weights = [tuple(unit.module.parameters()) for unit in units]
        self._num_forwards = 0
        # Passes with gradients no backward of which was seen here.
        self._owed: set[int] = set()
        self._uses = Uses(units, self._order)
        self._running: list[Call] = []
        self._active: list[Call] = []
        self._tasks: list[int] = []
        is_unit = False
        for index, unit in enumerate(units):
            is_unit |= unit.module is root
            self._watch(unit.module, index, is_root=unit.module is root)
        if not is_unit:
            self._watch(root, None, is_root=True)

    def begin_step(self) -> None:
        """Forget forwards whose backward never came; for ``zero_grad()`` on all ranks."""
        self.end_pass()
        self._owed.clear()
        self._release_all()

    def finish(self) -> None:
        """End what is open, so that a rank that left out a backward joins those that run it.

        Every rank has run the same forwards. Call it before gradients are reduced, on all ranks.

        Raises:
            LifecycleError: On every rank: they have run different passes.

        Communicates:
            The gathers of backwards that were left out, and one all-reduce of 16 bytes.
        """
        self.catch_up()
        self.compare()

    def catch_up(self) -> None:
        """The first half of `finish`."""
        self._join_others()
        self._release_all()

    def compare(self) -> None:
        """The second half of `finish`, which may come after the reductions."""
        self._pace.compare()

    def reset(self) -> None:
        """Leave a pass that an exception broke off; on all ranks, for ``zero_grad(discard=True)``.

        Ranks that were not interrupted may have gathered more: this joins them, then releases all.
        """
        try:
            self._join_others()
        finally:
            self._release_all()

    def end_pass(self) -> None:
        """End what is open on this rank; on all ranks, before others gather or release units."""
        self._running.clear()
        if self._order_is_backward or self._tasks:
            self._end_backward()
        if self._order.kind is not None:
            self._order.end(was_run=True)

    def relearn_order(self) -> None:
        """Let the next pass of each kind find out anew what ranks need; on all ranks together."""
        self.end_pass()
        self._order.forget()

    def _watch(self, module: nn.Module, index: int | None, *, is_root: bool) -> None:
        # Compilers leave these alone: what they do depends on the step, not on shapes.
        disable: Callable[[Any], Any] = torch.compiler.disable
        before = disable(partial(self._before_forward, index, is_root))
        after = disable(partial(self._after_forward, index, is_root))
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)

    def _before_forward(
        self, index: int | None, is_root: bool, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        task = torch._C._current_graph_task_id()
        if task == _OUTSIDE:
            self._enter_forward(index, is_root=is_root)
        else:
            self._enter_backward(task)
        forward = self._num_forwards if self._order.kind is Pass.FORWARD else None
        self._running.append(Call(index, next_number(), task, forward))
        if index is not None:
            self._uses.take(index)

    def _after_forward(
        self,
        index: int | None,
        is_root: bool,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> Any:
        call = self._leave(index)
        if call is None:
            return None
        result = output
        nodes = []
        if torch.is_grad_enabled():
            sides = self._side_outputs.find(module, call.start)
            nodes = nodes_since(call.start, output, args, kwargs, sides)
        if index is not None:
            # A copy is made while the weights are there, and runs backward like the rest.
            result = copy_aliases(output, self._weights[index], self._units[index].name)
            if call.task != _OUTSIDE:
                self._uses.hold(index)
            elif nodes:
                self._order.need_later(index)
        for node in nodes:
            node.register_prehook(partial(self._before_node, call, number_of(node)))
        if index is not None:
            self._uses.drop(index)
        if is_root and call.task == _OUTSIDE and not self._running:
            failed = output is None and sys.exc_info()[0] is not None
            if not failed and not self._order_is_backward:
                self._order.end(was_run=True)
        return None if result is output else result

    def _before_node(self, call: Call, number: int, gradients: Any) -> None:
        """Runs before a node of a unit that others of the unit come after."""
        task = torch._C._current_graph_task_id()
        self._enter_backward(task)
        self._owed.discard(call.forward if call.forward is not None else -1)
        # Nodes run in the reverse order of their making: see `next_number`.
        for other in [c for c in self._active if c.task == task and c.start > number]:
            self._finish_call(other)
        if any(c is call for c in self._active):
            return
        call.task = task
        self._active.append(call)
        if call.index is None:
            return
        self._uses.take(call.index)
        if torch.is_grad_enabled():
            # The gradients will be differentiated again, by nodes that nothing announces.
            self._uses.retain(call.index)

    def _enter_forward(self, index: int | None, *, is_root: bool) -> None:
        if is_root and any(call.index == index for call in self._running):
            self._running.clear()  # left by an exception that Python's modules do not see
        if self._running:
            return
        if self._order_is_backward:
            self._end_backward()  # it raised
        kind = Pass.FORWARD if torch.is_grad_enabled() else Pass.INFERENCE
        if self._order.kind is not None and (
            is_root
            or self._order.kind is not kind
            or (index is not None and self._order.is_behind(index))
        ):
            self._order.end(was_run=True)
        if self._order.kind is None:
            keep = self._keep and kind is Pass.FORWARD
            self._order.begin(kind, keep=keep)
            if kind is Pass.FORWARD:
                self._num_forwards += 1
                self._owed.add(self._num_forwards)

    def _enter_backward(self, task: int) -> None:
        if not self._tasks:
            self._tasks.append(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            # A backward inside a forward is part of that: its gathers come at a place in it.
            if not self._running:
                if self._order.kind is not None:
                    self._order.end(was_run=True)
                again = not self._owed
                self._order.begin(Pass.SECOND_BACKWARD if again else Pass.BACKWARD)
        elif task not in self._tasks:
            self._tasks.append(task)  # a backward that a node of the other one runs
        while self._tasks[-1] != task:
            inner = self._tasks.pop()
            for call in [call for call in self._active if call.task == inner]:
                self._finish_call(call)

    def _end_backward(self) -> None:
        for call in list(self._active):
            self._finish_call(call)
        self._uses.let_all_go()
        self._tasks.clear()
        if self._order_is_backward:
            self._order.end(was_run=True)
            if not self._owed:
                self._uses.drop_kept()

    @property
    def _order_is_backward(self) -> bool:
        return self._order.kind is not None and self._order.kind.is_backward

    def _finish_call(self, call: Call) -> None:
        self._active.remove(call)
        if call.index is not None:
            self._uses.let_go(call.index)
            self._uses.drop(call.index)

    def _leave(self, index: int | None) -> Call | None:
        """Return the innermost run of this unit, and forget those in it that never ended."""
        place = len(self._running) - 1
        while place >= 0 and self._running[place].index != index:
            place -= 1
        if place < 0:
            return None  # it was never entered: a hook before ours raised
        call = self._running[place]
        for inner in self._running[place + 1 :]:
            if inner.index is not None:
                self._uses.drop(inner.index)
        del self._running[place:]
        return call

    def _join_others(self) -> None:
        self.end_pass()
        if len(self._owed) > 1:
            warnings.warn(
                f"{len(self._owed)} forwards with gradients had no backward before reduce(); their "
                "gathers were repeated for ranks that may have run one; evaluate under no_grad()",
                GatherOrderWarning,
                stacklevel=3,
            )
        for _ in sorted(self._owed):
            self._order.begin(Pass.BACKWARD)
            self._order.end(was_run=False)
        self._owed.clear()

    def _release_all(self) -> None:
        self._running.clear()
        self._active.clear()
        self._tasks.clear()
        self._uses.release_all()
