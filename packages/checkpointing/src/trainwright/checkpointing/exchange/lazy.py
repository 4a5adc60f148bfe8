"""Tensors of a folder by name: what they are is known, their elements are read when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import attrs
import torch

from trainwright.checkpointing.errors import DamagedCheckpointError, MismatchError
from trainwright.checkpointing.state.tree import Sharded
from trainwright.collectives import Box
from trainwright.collectives.overlap import find_crossing_boxes
from trainwright.collectives.shard_spec import ShardSpec

Copy = Callable[[Box, torch.Tensor], None]


@attrs.frozen(eq=False)
class Piece:
    """A box of the global tensor that lies somewhere in one piece.

    ``copy`` is given a box of the piece, counted from the piece's first corner, and a tensor of
    that box's shape to write to.
    """

    box: Box
    copy: Copy


@attrs.frozen(eq=False)
class LazyTensor:
    """A tensor in a foreign folder.

    Args:
        name: Its name there.
        dtype: Its dtype.
        shape: Its global shape.
        pieces: What it is made of.
        source: The folder or file, for messages.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    source: str

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return Box.full(self.shape).numel

    @property
    def num_bytes(self) -> int:
        """The bytes of its elements."""
        return self.numel * self.dtype.itemsize

    def read(
        self,
        spec: ShardSpec | None = None,
        *,
        into: torch.Tensor | None = None,
        cast: bool = False,
    ) -> torch.Tensor:
        """Return this tensor, or the part of it that ``spec`` says; only that part is read.

        Args:
            spec: Which part; None: all of it. Its name is not looked at.
            into: What to fill, of ``spec.local_shape`` or flat; None: a new tensor on the host.
            cast: Whether ``into`` may have another dtype, to which elements are then converted.

        Raises:
            MismatchError: ``spec`` or ``into`` do not fit this tensor.
            DamagedCheckpointError: Elements are missing, or not what was written.
        """
        spec = spec if spec is not None else ShardSpec.full(self.name, self.shape)
        self._check(spec, into, cast)
        steps = self._plan(spec)
        with torch.no_grad():
            result = into.detach() if into is not None else None
            flat = result.view(-1) if result is not None and _is_plain(result) else None
            if flat is None:
                dtype = self.dtype if result is None else result.dtype
                flat = torch.empty(spec.numel, dtype=dtype)
            for piece, inner, at, box, outer in steps:
                piece.copy(inner, flat[at : at + box.numel].view(box.shape)[outer.slices])
            if result is None:
                return flat.view(spec.local_shape)
            if not _is_plain(result):
                result.copy_(flat.view(result.shape))
            return into if into is not None else result

    def _check(self, spec: ShardSpec, into: torch.Tensor | None, cast: bool) -> None:
        if spec.global_shape != self.shape:
            raise MismatchError(
                f"{self.source}: {self.name}: expected shape {spec.global_shape}, "
                f"found {self.shape}"
            )
        if into is None:
            return
        if tuple(into.shape) not in (spec.local_shape, (spec.numel,)):
            raise MismatchError(
                f"{self.source}: {self.name}: the part to be filled has shape {spec.local_shape} "
                f"(or is flat), got {tuple(into.shape)}"
            )
        if into.dtype != self.dtype and not cast:
            raise MismatchError(
                f"{self.source}: {self.name}: expected {into.dtype}, found {self.dtype}; "
                "cast=True converts"
            )

    def _plan(self, spec: ShardSpec) -> list[tuple[Piece, Box, int, Box, Box]]:
        """Return (piece, box of it, flat position of a part, the part, box of it) to copy."""
        steps: list[tuple[Piece, Box, int, Box, Box]] = []
        touched: dict[int, Box] = {}
        found = 0
        for at, box in spec.parts():
            for number, piece in enumerate(self.pieces):
                shared = piece.box.intersect(box)
                if shared is not None:
                    touched[number] = piece.box
                    found += shared.numel
                    inner = shift(shared, piece.box.start)
                    steps.append((piece, inner, at, box, shift(shared, box.start)))
        crossing = find_crossing_boxes(list(touched.values()))
        if crossing is not None or found != spec.numel:
            what = "are there twice" if crossing is not None else f"are {found} in number"
            raise DamagedCheckpointError(
                f"{self.source} is damaged: {self.name}: of {spec.numel} wanted elements, those "
                f"in its pieces {what}"
            )
        return steps


@attrs.frozen(eq=False)
class LazyObject:
    """A value that is no tensor; ``read`` returns it if it is made of plain values and tensors."""

    name: str
    num_bytes: int
    read: Callable[[], Any]


@attrs.frozen(eq=False)
class Source:
    """What a foreign folder holds; it keeps files open until it is closed.

    Args:
        tensors: Tensors by name.
        objects: Other values by name.
        paths: The keys that lead to an entry in the nested dictionary it was saved from, where the
            format says so.
        aliases: Names of tensors that are not stored, and the names that stand for them.
        on_close: Releases the files.
    """

    tensors: Mapping[str, LazyTensor]
    objects: Mapping[str, LazyObject]
    paths: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, str]
    on_close: Callable[[], None]

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the files."""
        self.on_close()

    def fill(
        self,
        targets: Mapping[str, torch.Tensor | Sharded],
        *,
        cast: bool = False,
        tied: Mapping[str, str] | None = None,
    ) -> tuple[str, ...]:
        """Fill tensors, or this rank's parts of them, in place.

        Everything is compared before the first one is written.

        Args:
            targets: What to fill, by name.
            cast: Whether dtypes may differ.
            tied: Pairs of names of one weight, of which the folder may hold either; what other
                tools leave out of a folder (transformers: ``lm_head.weight``) is not told in it.

        Returns:
            The names of the folder's tensors that nobody asked for.

        Raises:
            MismatchError: Tensors are missing, or of another shape or dtype; all are listed.
            DamagedCheckpointError: A file is not what was written.
        """
        problems: list[str] = []
        plans: list[tuple[LazyTensor, ShardSpec, torch.Tensor]] = []
        for name, target in targets.items():
            found = self._find(name, tied or {})
            if found is None:
                problems.append(f"{name}: expected a tensor, found nothing of that name")
                continue
            tensor = target.tensor if isinstance(target, Sharded) else target
            spec = ShardSpec.full(name, tensor.shape)
            spec = target.spec if isinstance(target, Sharded) else spec
            try:
                found._check(spec, tensor, cast)
            except MismatchError as error:
                problems.append(str(error))
            plans.append((found, spec, tensor))
        if problems:
            raise MismatchError("\n".join(problems))
        for found, spec, tensor in plans:
            found.read(spec, into=tensor, cast=cast)
        asked = {found.name for found, _, _ in plans}
        return tuple(name for name in self.tensors if name not in asked)

    def _find(self, name: str, tied: Mapping[str, str]) -> LazyTensor | None:
        others = [tied[name]] if name in tied else []
        others += [other for other, partner in tied.items() if partner == name]
        for known in (name, *others):
            found = self.tensors.get(self.aliases.get(known, known))
            if found is not None:
                return found
        return None


def shift(box: Box, origin: tuple[int, ...]) -> Box:
    """Return ``box`` counted from ``origin``."""
    start = tuple(i - o for i, o in zip(box.start, origin, strict=True))
    stop = tuple(i - o for i, o in zip(box.stop, origin, strict=True))
    return Box(start, stop)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
