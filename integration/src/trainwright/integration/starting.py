"""Starting the ranks of a command that looks at a model."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch.distributed.elastic.multiprocessing.errors import record

from trainwright.collectives import Communicator, SingleCommunicator
from trainwright.integration import launch
from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError


class Request(attrs.AttrsInstance, Protocol):
    """What a command is asked for: an attrs value of plain data, which travels to processes."""

    @property
    def leaves(self) -> dict[str, Any]:
        """The settings of the model, by the names of their leaves."""
        ...

    def run(self, world: Communicator) -> None:
        """Do it on this rank."""
        ...


def run_on_ranks(request: Request, transport: str) -> int:
    """Do what is asked for on as many ranks as the layout has.

    These are threads, those that torchrun has started, or new processes; a single rank is this
    process.

    Args:
        request: of a class that its module has by name.
        transport: one of `settling.TRANSPORTS`.

    Returns:
        The exit code.

    Raises:
        ConfigError: there are more or fewer processes than ranks.
    """
    size = RunConfig.from_mapping(request.leaves).parallel.mesh.world_size
    if transport == "threads":
        launch.run_as_threads(size, request.run)
        return 0
    place = launch.place_in_environment(os.environ)
    if place is not None:
        if place.world_size != size:
            raise ConfigError(
                f"--layout needs {size} processes, and {place.world_size} were started"
            )
        launch.run_as_worker(place, request.run, transport)
        return 0
    if size == 1 and transport == "auto":
        request.run(SingleCommunicator("cuda" if torch.cuda.is_available() else "cpu"))
        return 0
    launch.check_startable(size)
    text = json.dumps(attrs.asdict(request))
    return launch.start_workers(size, functools.partial(_work, type(request)), [transport, text])


def _work(kind: Callable[..., Request], arguments: Sequence[str]) -> int:
    """Do the part of one rank in a process that was started for it."""
    transport, text = arguments
    _recorded(kind(**json.loads(text)), transport)
    return 0


@record
def _recorded(request: Request, transport: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    launch.end_with_launcher()
    place = launch.place_in_environment(os.environ)
    assert place is not None, "it was started as a rank"
    launch.run_as_worker(place, request.run, transport)
