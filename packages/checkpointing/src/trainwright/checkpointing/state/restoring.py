"""One load: find who holds what, compare it all on all ranks, and only then write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import attrs

from trainwright.checkpointing.errors import LoadFailedError, MismatchError, TreeError

from .filling import DataFiles, fill_all
from .ledger import find_unwanted
from .matching import Match, is_named, match_leaves, places_of
from .opening import Opened, open_newest
from .planning import Place
from .ranks import Ranks
from .reporting import MAX_REPORTED, LoadReport, gather_lines
from .tree import Leaves, Tree, check_axes, put_plain, take_leaves

T = TypeVar("T")
_MAX_PROBLEMS = 20


@attrs.frozen
class LoadRequest:
    """What is asked of a load; the same on every rank.

    Args:
        step: Which checkpoint; None: the newest.
        is_partial: Whether the target may have more than the checkpoint, and the other way round.
        skip: Patterns of paths of the target that are left as they are.
        convert: Patterns of paths of the target whose stored dtype may differ.
    """

    step: int | None
    is_partial: bool
    skip: tuple[str, ...]
    convert: tuple[str, ...]

    @classmethod
    def of(cls, step: Any, is_partial: bool, skip: Any, convert: Any) -> LoadRequest:
        """Return the request.

        Raises:
            TreeError: It is not made of a step and collections of strings.
        """
        if step is not None and (type(step) is not int or step < 0):
            raise TreeError(f"step must be an integer from 0, or None, got {step!r}")
        return cls(step, is_partial, _take_paths("skip", skip), _take_paths("convert", convert))


def _take_paths(name: str, paths: Any) -> tuple[str, ...]:
    taken = tuple(paths) if isinstance(paths, Iterable) else ()  # once: it may be a generator
    is_sound = isinstance(paths, Iterable) and not isinstance(paths, str)
    if not is_sound or not all(type(path) is str and path for path in taken):
        raise TreeError(f"{name} must be a collection of paths, got {paths!r}")
    return taken


def load_tree(
    ranks: Ranks, place: Place, run: str | None, tree: Tree, ask: Callable[[], LoadRequest]
) -> LoadReport:
    """Fill the tensors of ``tree`` from a checkpoint; see `StateStore.load`.

    Args:
        ranks: The ranks; each calls it with its own tree.
        place: Where the checkpoints are.
        run: Of which run; None: of any.
        tree: What to fill.
        ask: Returns what is asked for, or raises.
    """
    return _Load(ranks, place).load(run, tree, ask)


class _Load:
    def __init__(self, ranks: Ranks, place: Place) -> None:
        self._ranks = ranks
        self._place = place

    def load(self, run: str | None, tree: Tree, ask: Callable[[], LoadRequest]) -> LoadReport:
        request, leaves = self._agreed(lambda: (ask(), self._take_target(tree)))
        self._compare_requests(request, leaves)
        files, root = self._place.files, self._place.root
        opened = open_newest(self._ranks, files, root, run, request.step)
        match, unexpected = self._match(opened, leaves, request)
        report = self._report(opened, request, match, unexpected)
        with DataFiles(files, opened.saved.folder) as data:
            self._agreed(lambda: fill_all(data, match.wants))
        return attrs.evolve(report, tree=put_plain(tree, match.plain))

    def _agreed(self, work: Callable[[], T]) -> T:
        return self._ranks.agreed(work, f"{self._place.root} was not loaded", LoadFailedError)

    def _take_target(self, tree: Tree) -> Leaves:
        leaves = take_leaves(tree, to_fill=True)
        check_axes(leaves, self._place.coordinates, self._ranks.comm.size)
        return leaves

    def _compare_requests(self, request: LoadRequest, leaves: Leaves) -> None:
        """Raise unless all ranks ask for the same, and for nothing that no rank has."""
        mine = json.dumps(attrs.astuple(request))
        first = self._ranks.broadcast(mine.encode("ascii")).decode("ascii")

        def compare() -> None:
            if first != mine:
                raise TreeError(
                    f"it asks for (step, partial, skip, convert) = {mine}, rank 0 for {first}"
                )

        self._agreed(compare)
        paths = (*leaves.tensors, *leaves.plain)
        for name, patterns in (("skip", request.skip), ("convert", request.convert)):
            for pattern in patterns:
                if self._ranks.total(sum(is_named(path, (pattern,)) for path in paths)) == 0:
                    raise TreeError(
                        f"{self._place.root} was not loaded: {name} has {pattern!r}, but no path "
                        "of the target is that, below that, or matches it"
                    )

    def _match(
        self, opened: Opened, leaves: Leaves, request: LoadRequest
    ) -> tuple[Match, list[str]]:
        """Return what was found for this rank, and the names it knows that no rank has."""
        saved = opened.saved
        plain = self._agreed(lambda: saved.manifest.decode_plain(saved.folder))
        paths = {*leaves.tensors, *leaves.plain}
        skipped = [path for path in paths if is_named(path, request.skip)]
        wanted = leaves.without(skipped)
        # A plain value must not be a tensor there, so all paths are looked for.
        questions = {path: leaf.spec for path, leaf in wanted.tensors.items()}
        located = opened.index.locate({**dict.fromkeys(wanted.plain), **questions})
        match = self._agreed(
            lambda: match_leaves(wanted, located, plain, request.convert, request.is_partial)
        )
        match.skipped[:] = sorted(skipped)
        match.unexpected_plain[:] = [path for path in plain if path not in paths]
        unexpected = find_unwanted(self._ranks, paths, opened.index.names)
        return match, self._without_aliases(opened, match, unexpected)

    def _without_aliases(self, opened: Opened, match: Match, names: Sequence[str]) -> list[str]:
        """Return those of the names that are not another name of a tensor that is loaded."""
        if self._ranks.total(len(names)) == 0:
            return []
        located = opened.index.locate(dict.fromkeys(names))
        places = {name: places_of(found)[:1] for name, found in located.items() if found}
        wanted = {str(place) for want in match.wants for place in places_of(want.located)}
        asked = {str(place) for found in places.values() for place in found}
        unwanted = {*find_unwanted(self._ranks, wanted, asked)}
        return [name for name in names if not places.get(name) or str(places[name][0]) in unwanted]

    def _report(
        self, opened: Opened, request: LoadRequest, match: Match, unexpected: Sequence[str]
    ) -> LoadReport:
        """Raise on all ranks alike where the checkpoint does not fit; else say what it lacks."""
        manifest = opened.saved.manifest
        doing = f"{opened.saved.folder.name} is not what the target expects"
        problems = list(match.problems)
        if not request.is_partial:
            problems += [f"{path}: {_MISSING_TENSOR}" for path in match.missing]
            problems += [f"{path}: {_MISSING_PLAIN}" for path in match.missing_plain]
            problems += [f"{path}: {_EXTRA_TENSOR}" for path in unexpected]
            problems += [f"{path}: {_EXTRA_PLAIN}" for path in match.unexpected_plain]
        self._raise(doing, problems)
        here = [*match.missing, *match.missing_plain, *match.missing_keys]
        there = [*unexpected, *match.unexpected_plain, *match.unexpected_keys]
        missing: tuple[list[str], int] = ([], 0)
        extra: tuple[list[str], int] = ([], 0)
        if request.is_partial:
            missing = gather_lines(self._ranks, here, MAX_REPORTED)
            extra = gather_lines(self._ranks, there, MAX_REPORTED)
            self._refuse_nothing(doing, match, missing[0], extra[0])
        return LoadReport(
            {},
            manifest.run,
            manifest.step,
            tuple(missing[0]),
            missing[1],
            tuple(sorted(here)),
            tuple(extra[0]),
            extra[1],
            tuple(match.skipped),
            tuple(match.converted),
        )

    def _refuse_nothing(
        self, doing: str, match: Match, missing: Sequence[str], extra: Sequence[str]
    ) -> None:
        """Raise where no path of the target is in the checkpoint, which no one can have meant."""
        found = self._ranks.total(len(match.wants) + match.num_plain_found)
        if found == 0 and missing:
            raise MismatchError(
                f"{self._place.root} was not loaded: {doing}: none of its paths is there; expected "
                f"{', '.join(missing[:3])}, found {', '.join(extra[:3]) or 'nothing at all'}"
            )

    def _raise(self, doing: str, problems: Sequence[str]) -> None:
        lines, count = gather_lines(self._ranks, problems, _MAX_PROBLEMS)
        if not lines:
            return
        if count > len(lines):
            lines.append(f"and {count - len(lines)} more")
        raise MismatchError("\n  ".join([f"{self._place.root} was not loaded: {doing}:", *lines]))


_MISSING_TENSOR = "expected a tensor, found nothing of that path"
_MISSING_PLAIN = "expected a plain value, found nothing of that path"
_EXTRA_TENSOR = "expected nothing of that path, found a tensor in the checkpoint"
_EXTRA_PLAIN = "expected nothing of that path, found a plain value in the checkpoint"
