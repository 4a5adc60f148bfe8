"""The protocols of this package: how layers run, what they keep and where, where files live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

Reenter = Callable[[], AbstractContextManager[object]]


@runtime_checkable
class LayerRunner(Protocol):
    """Runs a stack of layers and decides which activations are kept for the backward pass.

    Laws: outputs, gradients and the positions of random generators are bitwise those of calling
    the layers one after the other; no parameter is renamed, wrapped or moved.
    """

    def __call__(self, layers: Iterable[nn.Module], hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return ``layers[-1](... layers[0](hidden, *args, **kwargs) ..., *args, **kwargs)``."""
        ...


@runtime_checkable
class Capture(Protocol):
    """Looks at ambient state when a layer runs, and says how to bring it back for a recomputation.

    It is called during the forward; context variables that it sets end with the layer. What it
    returns is called once for each recomputation, and gives a context manager under which the layer
    runs again.
    """

    def __call__(self) -> Reenter:
        """Return what re-enters the state that holds now."""
        ...


@runtime_checkable
class Held(Protocol):
    """A tensor that backward needs, in the form or place that a `Keeper` gave it."""

    @property
    def resident(self) -> Sequence[torch.Tensor]:
        """Return what of it lives where the model runs, such as encoded parts."""
        ...

    def restore(self) -> torch.Tensor:
        """Return the tensor, with its shape, strides, dtype and device; may be called again."""
        ...


@runtime_checkable
class Keeper(Protocol):
    """Decides how a tensor is kept from the forward to the backward.

    Laws: what `Held.restore` returns has the values that the tensor had when ``hold`` was called,
    whatever happens to the tensor in the meantime, but for an error that the keeper states. What
    a held tensor takes is given back when nobody refers to it any more.
    """

    def hold(self, tensor: torch.Tensor) -> Held | None:
        """Return the tensor held, or None for one that is to stay as it is."""
        ...


class Writer(Protocol):
    """A file being written from its beginning to its end."""

    def write(self, data: bytes | memoryview) -> None:
        """Append all of ``data``."""
        ...

    def sync(self) -> None:
        """Return once everything written would survive a power failure."""
        ...

    def close(self) -> None:
        """Release the file; says nothing about durability."""
        ...


class Reader(Protocol):
    """A file open for reading at any position."""

    @property
    def size(self) -> int:
        """Length in bytes."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset``; returns the bytes read, fewer only at the end."""
        ...

    def view(self, offset: int, count: int) -> memoryview:
        """Return the bytes from ``offset``, fewer only at the end; to be read, not written.

        They are those of the file itself where it can be mapped, else a copy.
        """
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class Files(Protocol):
    """All that a store of checkpoints asks of a file system; failures are `OSError`.

    Laws: what was synced survives a crash; a rename is seen whole or not at all, and survives once
    the folder that holds it was synced.
    """

    def make_folder(self, folder: Path) -> None:
        """Create ``folder`` and what leads to it, to survive a crash; existing ones are kept."""
        ...

    def create(self, path: Path) -> Writer:
        """Open a new file for writing; `FileExistsError` if there is one."""
        ...

    def open(self, path: Path) -> Reader:
        """Open a file for reading."""
        ...

    def names(self, folder: Path) -> list[str]:
        """Return the names in ``folder``, in any order; none if there is no such folder."""
        ...

    def size(self, path: Path) -> int:
        """Return the length of a file in bytes."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Give a folder a new name in one indivisible step; an existing target is an error."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Return once the names in ``folder`` would survive a power failure."""
        ...

    def remove_folder(self, folder: Path) -> None:
        """Remove ``folder`` and all that is in it; one that does not exist is left so."""
        ...

    def free_bytes(self, folder: Path) -> int | None:
        """Return the space left where ``folder`` lies, or None where nobody can say."""
        ...
