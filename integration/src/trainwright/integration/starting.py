"""Starting the ranks of a command that looks at a model."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from trainwright.collectives import Communicator, SingleCommunicator
from trainwright.integration import launch
from trainwright.integration.errors import ConfigError

Work = Callable[[Communicator], None]


def run_on_ranks(
    size: int,
    transport: str,
    work: Work,
    elsewhere: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
) -> int:
    """Do the same on all ranks: threads, those that torchrun has started, or new processes.

    A single rank is this process.

    Args:
        size: number of ranks.
        transport: one of `settling.TRANSPORTS`.
        work: what a rank does.
        elsewhere: a public function of a module that does the same in a process that was started
            for it, with `work_in_process`.
        arguments: what it is called with.

    Returns:
        The exit code.

    Raises:
        ConfigError: there are more or fewer processes than ranks.
    """
    if transport == "threads":
        launch.run_as_threads(size, work)
        return 0
    place = launch.place_in_environment(os.environ)
    if place is not None:
        if place.world_size != size:
            raise ConfigError(
                f"--layout needs {size} processes, and {place.world_size} were started"
            )
        launch.run_as_worker(place, work, transport)
        return 0
    if size == 1 and transport == "auto":
        work(SingleCommunicator("cuda" if torch.cuda.is_available() else "cpu"))
        return 0
    launch.check_startable(size)
    return launch.start_workers(size, elsewhere, [transport, *arguments])


def work_in_process(work: Work, transport: str) -> int:
    """Do the work of one rank in a process that `run_on_ranks` has started."""
    _recorded(work, transport)
    return 0


@record
def _recorded(work: Work, transport: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    launch.end_with_launcher()
    place = launch.place_in_environment(os.environ)
    assert place is not None, "it was started as a rank"
    launch.run_as_worker(place, work, transport)
