"""Starting ranks: torchrun's machinery, the environment of torchrun or Slurm, or threads."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import attrs
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainwright.collectives import Communicator, LocalWorld, TorchCommunicator
from trainwright.collectives.shm import SharedMemoryCommunicator
from trainwright.integration.endings import Ending, ending_of, passing_on, waking
from trainwright.integration.errors import ConfigError
from trainwright.integration.meeting import meet

T = TypeVar("T")
TIMEOUT_S = 300.0
"""How long ranks wait for each other where nobody says."""

_LOOK_S = 0.5
_GRACE_S = 30.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOUD = (
    "torch.distributed.elastic",
    "torch.distributed.elastic.agent.server.api",
    "torch.multiprocessing.spawn",
)
# A fork of the launcher itself would have the locks of threads that it has not.
_FORKING = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


@attrs.frozen
class ProcessPlace:
    """Where a process stands among those that were started together."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def place_in_environment(environment: Mapping[str, str]) -> ProcessPlace | None:
    """Return this process's place as torchrun or Slurm tells it, or None when started alone.

    Raises:
        ConfigError: the environment is incomplete, or there is no such place.
    """
    if environment.keys() & {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"}:
        _require_meeting_place(environment, "with RANK and WORLD_SIZE set")
        return _place(environment, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "SLURM_PROCID" in environment and environment.get("SLURM_NTASKS", "1") != "1":
        _require_meeting_place(environment, "under Slurm")
        return _place(
            environment, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"
        )
    return None


def _require_meeting_place(environment: Mapping[str, str], where: str) -> None:
    if not environment.get("MASTER_ADDR") or not environment.get("MASTER_PORT", "").isdecimal():
        raise ConfigError(
            f"{where}, MASTER_ADDR and MASTER_PORT must name the first node and a free port there; "
            "torchrun sets them, a batch script exports them"
        )


def run_as_worker(
    place: ProcessPlace,
    work: Callable[[Communicator], T],
    transport: str = "auto",
    timeout_s: float = TIMEOUT_S,
) -> T:
    """Join the process group, run ``work`` on it and leave.

    Errors are told to the peers first, so that they stop with the cause and not with a timeout.

    Args:
        place: this process among all.
        work: is given the communicator.
        transport: ``auto`` is NCCL where there are GPUs, else Gloo; ``gloo`` and ``shm`` (memory
            that the processes of one host share) keep tensors on the CPU.
        timeout_s: how long ranks wait for each other, to meet and in every operation.
    """
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= place.local_world_size
    use_cuda = has_gpus and transport == "auto"
    device = torch.device("cuda", place.local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.local_world_size))
    dist.init_process_group(
        "nccl" if use_cuda else "gloo",
        store=meet(place.rank, place.world_size, timeout_s),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if use_cuda else None,
    )
    world: TorchCommunicator | SharedMemoryCommunicator
    if transport == "shm":
        world = SharedMemoryCommunicator()
    else:
        world = TorchCommunicator(device=device)
    try:
        result = work(world)
    except BaseException as error:
        world.abort(error)
        raise
    world.barrier()
    dist.destroy_process_group()
    return result


def run_as_threads(
    size: int, work: Callable[[Communicator], T], timeout_s: float = TIMEOUT_S
) -> list[T]:
    """Run ``work`` on ``size`` ranks that are threads of this process."""
    return LocalWorld(size, timeout_s=timeout_s).run(work)


def check_startable(size: int) -> None:
    """Check that one machine can run so many processes.

    Raises:
        ConfigError: ``size`` is far more than this machine can run at once.
    """
    most = max(64, 8 * (os.cpu_count() or 1))
    if size > most:
        raise ConfigError(
            f"the layout needs {size} processes; at most {most} are started on one machine. Use a "
            "smaller layout, or start one process a device on several machines with torchrun"
        )


def start_workers(size: int, work: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Call ``work(arguments)`` in ``size`` processes, through torchrun's launcher.

    They are forked from one process that has imported ``work``'s module and done nothing else, so
    that starting them does not take seconds of every core for each.

    Args:
        size: how many.
        work: a public function of a module; returns an exit code.
        arguments: what it is called with.

    Returns:
        The exit code: 0, 1 after a failed worker (named on standard error), or 128 + the number
        of the signal that stopped the launcher. No worker is left behind.
    """
    ending = run_workers(size, work, arguments)
    if ending.reason:
        sys.stderr.write(ending.reason + "\n")
    return ending.code


def run_workers(
    size: int,
    work: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    passed_on: Collection[signal.Signals] = (),
) -> Ending:
    """Do what `start_workers` does, and say how it ended.

    Args:
        size: how many.
        work: a public function of a module; returns an exit code.
        arguments: what it is called with.
        passed_on: signals that are passed on to the workers, which end by themselves then. Another
            one ends all at once.
    """
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    # Every torch optimizer imports the second when it is made.
    _prepare_forks([work.__module__, "torch._dynamo"])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method=_FORKING,
        signals_to_handle=",".join(each.name for each in _ENDING if each not in passed_on),
    )
    with passing_on(passed_on) as passed, waking(size):
        try:
            elastic_launch(config, _work)(work, list(arguments))
        except ChildFailedError as error:
            return ending_of(error, passed)
        except SignalException as stopped:
            _end_forks()
            reason = f"stopped by {stopped.sigval.name}; saved checkpoints are kept"
            return Ending(128 + int(stopped.sigval), reason)
        except KeyboardInterrupt:
            _end_forks()
            return Ending(128 + int(signal.SIGINT))
    return Ending(0)


def _prepare_forks(modules: list[str]) -> None:
    """Start the process that imports these modules and is forked then.

    A terminal's Ctrl-C reaches it too: it takes no notice, for this process is told and ends it.
    """
    multiprocessing.get_context(_FORKING).set_forkserver_preload(modules)
    if _FORKING == "forkserver":
        multiprocessing.resource_tracker.ensure_running()  # which unblocks it
        # Blocked, not ignored: one that comes meanwhile is not lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_forks() -> None:
    """End the process that others are forked from, which may still be importing."""
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    pid = getattr(server, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _work(work: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> None:
    # Nothing is told of a Ctrl-C from here: the launcher does.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    code = work(arguments)
    if code:
        sys.exit(code)


def end_with_launcher() -> None:
    """Let this process end when the one that started it as a rank is gone, whatever ended that.

    That is the one that called `start_workers`, or torchrun on this machine.
    """
    launcher, parent = multiprocessing.parent_process(), os.getppid()
    if launcher is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return

    def wait() -> None:
        if launcher is not None:
            launcher.join()
        while launcher is None and os.getppid() == parent:
            time.sleep(_LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)
        # One that saves first because of that gets as long as torchrun would give it.
        time.sleep(_GRACE_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="end with the launcher", daemon=True).start()


def _place(environment: Mapping[str, str], *names: str) -> ProcessPlace:
    missing = [name for name in names[:2] if name not in environment]
    if missing:
        raise ConfigError(
            f"the environment lacks {', '.join(missing)}; start with torchrun, or, for one process "
            f"alone, unset {' and '.join(names[:2])}"
        )
    try:
        rank, world_size = (int(environment[name]) for name in names[:2])
        local_rank = int(environment.get(names[2], rank))
        local_world_size = int(environment.get(names[3], world_size))
    except ValueError as error:
        raise ConfigError(
            f"the environment's {', '.join(names)} must be numbers: {error}"
        ) from error
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size):
        raise ConfigError(
            f"the environment says {names[0]}={rank} of {names[1]}={world_size}, {names[2]}="
            f"{local_rank} of {names[3]}={local_world_size}; ranks count from 0 to below the size"
        )
    return ProcessPlace(rank, world_size, local_rank, local_world_size)
