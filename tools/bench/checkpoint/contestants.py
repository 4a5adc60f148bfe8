"""Ways to write and read a state: torch.distributed.checkpoint with several settings, and ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tools.bench.checkpoint.state import Part, dtensors_of, tree_of
from trainwright.checkpointing import StateStore
from trainwright.collectives import Communicator

State = Mapping[str, Part]
Wait = Callable[[], object]


class Contestant(Protocol):
    """One way to keep checkpoints; one instance on each rank."""

    def save(self, state: State, folder: Path) -> None:
        """Return once the state is in ``folder`` and synced."""

    def start(self, state: State, folder: Path) -> Wait:
        """Return what waits for a save in the background, once the state may change."""

    def load(self, state: State, folder: Path) -> None:
        """Fill the state from what was saved in ``folder``."""

    def close(self) -> None:
        """End threads and processes."""


class Ours:
    """`StateStore`, with checksums of all that is written and read."""

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self._store: StateStore | None = None

    def save(self, state: State, folder: Path) -> None:
        """See `Contestant.save`."""
        StateStore(folder, self._world).save(1, tree_of(state, self._world.rank))

    def start(self, state: State, folder: Path) -> Wait:
        """See `Contestant.start`; one store for all rounds, as in training."""
        if self._store is None:
            self._store = StateStore(folder, self._world, keep=1, run="bench")
        return self._store.save(1, tree_of(state, self._world.rank), asynchronous=True).wait

    def load(self, state: State, folder: Path) -> None:
        """See `Contestant.load`."""
        StateStore(folder, self._world).load(tree_of(state, self._world.rank))

    def close(self) -> None:
        """See `Contestant.close`."""
        if self._store is not None:
            self._store.close()


class Dcp:
    """torch.distributed.checkpoint.

    Args:
        world: The ranks.
        kind: What carries asynchronous saves.
        has_stager: Whether they are copied to memory that a `DefaultStager` keeps, in place of
            memory that the writer makes anew. (A writer with a cache asks for an accelerator.)
        threads: Threads of a writer.
    """

    def __init__(
        self,
        world: Communicator,
        kind: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
        has_stager: bool = False,
        threads: int = 1,
    ) -> None:
        self._mesh: DeviceMesh = init_device_mesh("cpu", (world.size,))
        self._kind = kind
        self._threads = threads
        self._stager: DefaultStager | None = None
        if has_stager:
            is_process = kind is AsyncCheckpointerType.PROCESS
            self._stager = DefaultStager(StagingOptions(False, is_process, False, False))

    def save(self, state: State, folder: Path) -> None:
        """See `Contestant.save`."""
        writer = dcp.FileSystemWriter(folder, sync_files=True, thread_count=self._threads)
        dcp.save(self._dict(state), storage_writer=writer)

    def start(self, state: State, folder: Path) -> Wait:
        """See `Contestant.start`."""
        writer = dcp.FileSystemWriter(folder, sync_files=True, thread_count=self._threads)
        options: dict[str, Any] = {} if self._stager is None else {"async_stager": self._stager}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            response = dcp.async_save(
                self._dict(state),
                storage_writer=writer,
                async_checkpointer_type=self._kind,
                process_group=dist.group.WORLD,
                **options,
            )
        if isinstance(response, Future):
            return response.result
        response.staging_completion.result()
        return response.upload_completion.result

    def load(self, state: State, folder: Path) -> None:
        """See `Contestant.load`."""
        dcp.load(self._dict(state), storage_reader=dcp.FileSystemReader(folder))

    def close(self) -> None:
        """See `Contestant.close`."""
        if self._stager is not None:
            self._stager.close()

    def _dict(self, state: State) -> dict[str, Any]:
        return dict(dtensors_of(state, self._mesh))


SAVERS: dict[str, Callable[[Communicator], Contestant]] = {
    "dcp": Dcp,
    "dcp_threads": lambda world: Dcp(world, threads=2),
    "ours": Ours,
}
STARTERS: dict[str, Callable[[Communicator], Contestant]] = {
    "dcp": Dcp,
    "dcp_stager": lambda world: Dcp(world, has_stager=True),
    "dcp_process": lambda world: Dcp(world, AsyncCheckpointerType.PROCESS),
    "dcp_process_stager": lambda world: Dcp(world, AsyncCheckpointerType.PROCESS, has_stager=True),
    "ours": Ours,
}
LOADERS: dict[str, Callable[[Communicator], Contestant]] = {"dcp": Dcp, "ours": Ours}
