"""Where a run keeps what does not stay on its devices: ``--offload``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import attrs

from trainwright.collectives import Communicator, SingleCommunicator
from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.guarding import GuardPlan
from trainwright.integration.optimizers.plans import OptimizerPlan, Sees
from trainwright.integration.settings.parallel import NVME
from trainwright.sharding.data.agreement import agree
from trainwright.sharding.offload import Offload, OffloadError, offload_to_folder, offload_to_host


def offload_of(config: RunConfig, ranks: Communicator) -> Offload | None:
    """Return what keeps a rank's states, and maybe its weights, away from its device.

    At stage 3 a file takes the weights too.

    Args:
        config: the settings.
        ranks: all of the run, each with a file of its own.

    Raises:
        ConfigError: on every rank: on one of them the folder is none, or cannot be written to.

    Communicates: one all-reduce of 8 bytes for states in a file.
    """
    where, zero = config.parallel.offload, config.parallel.zero
    if where == "none":
        return None
    if not where.startswith(NVME):
        return offload_to_host(weights=where == "parameters")
    offload, problem = None, None
    try:
        offload = offload_to_folder(where.removeprefix(NVME), weights=zero == 3)
    except OffloadError as error:
        problem = str(error)
    _agree(config, ranks, problem)
    return offload


@contextlib.contextmanager
def space_for(config: RunConfig, offload: Offload | None, ranks: Communicator) -> Iterator[None]:
    """Let all ranks fail where there is no space on some for what is offloaded inside.

    Raises:
        ConfigError: on every rank.

    Communicates: with ``offload`` one all-reduce of 8 bytes.
    """
    problem = None
    try:
        yield
    except OffloadError as error:
        problem = str(error)
    if offload is not None:
        _agree(config, ranks, problem)


def _agree(config: RunConfig, ranks: Communicator, problem: str | None) -> None:
    try:
        agree(ranks, problem, OffloadError)
    except OffloadError as error:
        raise ConfigError(f"--offload {config.parallel.offload}: {error}") from error


def check_folder(config: RunConfig) -> None:
    """Check where a run is started that its states can be kept in the folder.

    Raises:
        ConfigError: the folder is none, or cannot be written to.
    """
    offload_of(config, SingleCommunicator())


def check_elements(where: str, plan: OptimizerPlan, name: str) -> None:
    """Check that an optimizer can be offloaded.

    Raises:
        ConfigError: it has to see whole parameters.
    """
    if any(share.sees is not Sees.ELEMENTS for share in plan.shares):
        raise ConfigError(
            f"--offload {where}: {name} has to see whole parameters, and "
            "states are offloaded in parts of them; take adamw, adam, sgd or lion, or --offload "
            "none"
        )


def without_copies(config: RunConfig, plan: GuardPlan) -> GuardPlan:
    """Return what watches a run without snapshots in memory, where a file keeps its states.

    Raises:
        ConfigError: somebody has asked for snapshots.
    """
    where = config.parallel.offload
    if not where.startswith(NVME) or not plan.snapshots:
        return plan
    if plan.asks_snapshots:
        raise ConfigError(
            f"--guards {config.guards.guards}: {plan.snapshots} snapshots are copies of all states "
            f"in host memory, and --offload {where} is for states that do not fit there; "
            'give "snapshots": 0, or --offload optimizer'
        )
    return attrs.evolve(plan, snapshots=0)


def check_offload(config: RunConfig) -> None:
    """Check that what is to be offloaded can be.

    Raises:
        ConfigError: weights are in use all the time, the optimizer has to see whole parameters, or
            states in a file would be copied to memory.
    """
    where, zero = config.parallel.offload, config.parallel.zero
    if where == "none":
        return
    if where == "parameters" and zero < 3:
        raise ConfigError(
            f"--offload parameters needs --zero 3: with --zero {zero} weights are whole and in use "
            "all the time; --offload optimizer works"
        )
    check_elements(where, config.optimizer.plan, config.optimizer.optimizer)
    if where.startswith(NVME) and config.saving.async_save:
        raise ConfigError(
            f"--async-save keeps a copy of all states in memory while it writes, and --offload "
            f"{where} is for states that do not fit there; leave one of them out"
        )
