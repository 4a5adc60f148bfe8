"""Starting ranks: torchrun's machinery, the environment of torchrun or Slurm, or threads."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainwright.collectives import Communicator, LocalWorld, TorchCommunicator
from trainwright.collectives.shm import SharedMemoryCommunicator
from trainwright.integration.errors import ConfigError

T = TypeVar("T")
TIMEOUT_S = 300.0
# A fork of the launcher itself would have the locks of threads that it has not.
_FORKING = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


@attrs.frozen
class Place:
    """Where a process stands among those that were started together."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def place_in_environment(environment: Mapping[str, str]) -> Place | None:
    """Return this process's place as torchrun or Slurm tells it, or None when started alone.

    Raises:
        ConfigError: the environment is incomplete.
    """
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE"} <= environment.keys():
        _require_meeting_place(environment, "with RANK and WORLD_SIZE set")
        return _place(environment, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        _require_meeting_place(environment, "under Slurm")
        return _place(
            environment, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"
        )
    return None


def _require_meeting_place(environment: Mapping[str, str], where: str) -> None:
    if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        raise ConfigError(
            f"{where}, MASTER_ADDR and MASTER_PORT must name the first node and a free port there; "
            "torchrun sets them, a batch script exports them"
        )


def run_as_worker(place: Place, work: Callable[[Communicator], T], transport: str = "auto") -> T:
    """Join the process group, run ``work`` on it and leave.

    Errors are told to the peers first, so that they stop with the cause and not with a timeout.

    Args:
        place: this process among all.
        work: is given the communicator.
        transport: ``auto`` is NCCL where there are GPUs, else Gloo; ``gloo`` and ``shm`` (memory
            that the processes of one host share) keep tensors on the CPU.
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
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
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


def run_as_threads(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """Run ``work`` on ``size`` ranks that are threads of this process."""
    return LocalWorld(size, timeout_s=TIMEOUT_S).run(work)


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
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    # Every torch optimizer imports the second when it is made.
    preload = [work.__module__, "torch._dynamo"]
    multiprocessing.get_context(_FORKING).set_forkserver_preload(preload)
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
    )
    try:
        elastic_launch(config, _work)(work, list(arguments))
    except ChildFailedError as error:
        sys.stderr.write(describe_failure(error) + "\n")
        return 1
    except SignalException as stopped:
        sys.stderr.write(f"stopped by {stopped.sigval.name}; saved checkpoints are kept\n")
        return 128 + int(stopped.sigval)
    except KeyboardInterrupt:
        return 128 + int(signal.SIGINT)
    return 0


def _work(work: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> None:
    code = work(arguments)
    if code:
        sys.exit(code)


def end_with_launcher() -> None:
    """Let this process end when the one that called `start_workers` is gone, whatever ended it."""
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return

    def wait() -> None:
        launcher.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="end with the launcher", daemon=True).start()


def describe_failure(error: ChildFailedError) -> str:
    """Return one line naming the rank that failed first and its error."""
    rank, failure = min(error.failures.items(), key=lambda item: _aftermath(item[1]))
    return f"rank {rank} failed: {_message(failure)}"


def _aftermath(failure: ProcessFailure) -> tuple[int, float]:
    # A process that was killed, or raised an error of its own, comes before those that stopped
    # because of it.
    if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
        return 0, failure.timestamp
    return (2 if "PeerFailedError" in _message(failure) else 1), failure.timestamp


def _message(failure: ProcessFailure) -> str:
    message: Any = failure.message
    if isinstance(message, dict):
        message = message.get("message", message)
    return str(message).strip() or f"exit code {failure.exitcode}"


def _place(environment: Mapping[str, str], *names: str) -> Place:
    missing = [name for name in names[:2] if name not in environment]
    if missing:
        raise ConfigError(f"the environment lacks {', '.join(missing)}; start with torchrun")
    try:
        rank, world_size = (int(environment[name]) for name in names[:2])
        local_rank = int(environment.get(names[2], rank))
        local_world_size = int(environment.get(names[3], world_size))
    except ValueError as error:
        raise ConfigError(
            f"the environment's {', '.join(names)} must be numbers: {error}"
        ) from error
    return Place(rank, world_size, local_rank, local_world_size)
