"""Where states are kept instead of on the device, and what moves them."""

from __future__ import annotations

from pathlib import Path

import attrs

from trainwright.sharding.offload.errors import OffloadError
from trainwright.sharding.offload.file import FileStore
from trainwright.sharding.offload.host import HostMemory
from trainwright.sharding.offload.lanes import Lane, Pace
from trainwright.sharding.offload.ledger import Ledger
from trainwright.sharding.offload.protocol import Store


@attrs.frozen(eq=False)
class Offload:
    """Where a rank keeps what does not stay on its device; for `data_parallel`.

    Args:
        states: Keeps the weights that the optimizer updates, and what the optimizer keeps.
        gradients: Keeps summed gradients from their backward to the update; norm and clipping read
            and write them there.
        weights: Keeps the rank's part of the module's weights between uses (stage 3); None leaves
            them on the device.
        to_host: Moves gradients.
        to_device: Moves weights.
        device: Counts the bytes of weights and gradients on the device.

    Raises:
        OffloadError: Some of it is to be kept in a file and some not in that file.
    """

    states: Store
    gradients: Store
    weights: Store | None = None
    to_host: Lane = attrs.field(factory=lambda: Lane("offload-to-host"))
    to_device: Lane = attrs.field(factory=lambda: Lane("offload-to-device"))
    device: Ledger = attrs.field(factory=lambda: Ledger("the device"))

    def __attrs_post_init__(self) -> None:
        others = [store for store in (self.gradients, self.weights) if store is not None]
        in_file = any(isinstance(store, FileStore) for store in (self.states, *others))
        if in_file and any(store is not self.states for store in others):
            raise OffloadError(
                "a file keeps states, gradients and weights together, got several stores; pass the "
                "same FileStore for all, leave weights on the device (weights=None), or take "
                "offload_to_folder() or offload_to_host()"
            )


def offload_to_host(
    *,
    weights: bool = False,
    link_bytes_s: float | None = None,
    device_limit_bytes: int | None = None,
    host_limit_bytes: int | None = None,
) -> Offload:
    """Keep states in host memory: the update is the host's, in its memory.

    Args:
        weights: Keep weights there too between uses, which needs stage 3.
        link_bytes_s: Lets moves take as long as at this rate, each way; for tests and measurements.
        device_limit_bytes: What the device may hold of weights and gradients.
        host_limit_bytes: What host memory may hold of model states.

    Raises:
        OffloadError: A rate or limit is out of range.
    """
    host = HostMemory(host_limit_bytes)
    return _offload(host, weights, link_bytes_s, device_limit_bytes)


def offload_to_folder(
    folder: str | Path,
    *,
    weights: bool = False,
    file_bytes_s: float | None = None,
    link_bytes_s: float | None = None,
    device_limit_bytes: int | None = None,
) -> Offload:
    """Keep states in a file without a name; room for three units of them stays in memory.

    Summed gradients wait in the file too, mapped: what reads them before the update, such as the
    norm, does so through the system's cache, which gives memory back as it is needed.

    Args:
        folder: A folder that exists, best on a fast local disk.
        weights: Keep weights there too between uses, which needs stage 3.
        file_bytes_s: Lets reads and writes together take as long as at this rate; for tests and
            measurements.
        link_bytes_s: As for `offload_to_host`.
        device_limit_bytes: As for `offload_to_host`.

    Raises:
        OffloadError: There is no such folder, it cannot be written to, or a rate or limit is out of
            range.
    """
    store = FileStore(folder, pace=Pace(file_bytes_s))
    return _offload(store, weights, link_bytes_s, device_limit_bytes)


def _offload(
    store: Store,
    weights: bool,
    link_bytes_s: float | None,
    device_limit_bytes: int | None,
) -> Offload:
    return Offload(
        states=store,
        gradients=store,
        weights=store if weights else None,
        to_host=Lane("offload-to-host", Pace(link_bytes_s)),
        to_device=Lane("offload-to-device", Pace(link_bytes_s)),
        device=Ledger("the device", device_limit_bytes),
    )
