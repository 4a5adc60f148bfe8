"""The most that a rank holds in a step, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.memory.away import file_bytes, host_bytes
from trainwright.sharding.memory.kept_bytes import BlockBytes, KeptBytes
from trainwright.sharding.memory.parameters import Slice
from trainwright.sharding.memory.rank_memory import Chunk, InFlight, RankMemory, Traffic
from trainwright.sharding.memory.shape import TransformerShape


def memory(
    shape: TransformerShape,
    chunks: Sequence[Chunk],
    in_flight: int | Iterable[InFlight],
    kept_bytes: KeptBytes,
    traffic: Traffic | None = None,
    *,
    buffer_bytes: int = 0,
) -> RankMemory:
    """Return what a rank holds at the worst moment of a step.

    Args:
        shape: The model's.
        chunks: Of the pipeline on this rank, with what `buckets_of` says of their states: there
            layout and bytes per parameter come in.
        in_flight: Microbatches of the only chunk that the rank holds at most, or what it holds when
            each of the backwards begins that may be the worst.
        kept_bytes: Of a microbatch, as `decoder_bytes` or a measurement says.
        traffic: When weights are whole and gradients are reduced.
        buffer_bytes: Of what is in modules and no parameter.

    Raises:
        ShardingError: The counts are not of these chunks.
    """
    if isinstance(in_flight, int):
        follows = frozenset({0}) if in_flight > 1 else frozenset()
        in_flight = [InFlight((in_flight,), 0, follows)]
    rank = _Rank(shape, tuple(chunks), kept_bytes, traffic or Traffic(), buffer_bytes)
    moments = [moment for each in in_flight for moment in rank.backward(each)]
    worst = max([rank.between, *moments], key=lambda each: each.allocated)
    return attrs.evolve(worst, reserve=int(worst.allocated * rank.traffic.reserve))


@attrs.frozen
class _Rank:
    shape: TransformerShape
    chunks: tuple[Chunk, ...]
    kept: KeptBytes
    traffic: Traffic
    buffer_bytes: int

    @property
    def between(self) -> RankMemory:
        """What lives from step to step."""
        buckets = [bucket for chunk in self.chunks for bucket in chunk.buckets]
        elsewhere = [bucket.elsewhere for bucket in buckets]
        return RankMemory(
            weights=sum(bucket.weights for bucket in buckets) + self.buffer_bytes,
            gradients=sum(bucket.gradients for bucket in buckets),
            states=sum(bucket.states for bucket in buckets),
            host=host_bytes(elsewhere),
            file=file_bytes(elsewhere),
        )

    def backward(self, at: InFlight) -> Iterator[RankMemory]:
        """Yield the moments of a backward that may be the worst."""
        if len(at.held) != len(self.chunks) or not 0 <= at.chunk < len(self.chunks):
            raise ShardingError(f"{at} is not of {len(self.chunks)} chunks")
        kept = self.kept
        chunk = self.chunks[at.chunk]
        held = sum(n * self._stage(c.part) for n, c in zip(at.held, self.chunks, strict=True))
        held += sum(
            n * self._deferred(c.part)
            for n, c in zip(at.waiting, self.chunks, strict=bool(at.waiting))
        )
        logits = sum(
            n * kept.logits for n, c in zip(at.held, self.chunks, strict=True) if c.part.is_last
        )
        base = attrs.evolve(self.between, activations=held, logits=logits)
        wholes = _Gradients(self.chunks, at, self.traffic)
        if chunk.part.is_last:
            yield self._moment(base, at, wholes, [], kept.loss, "loss")
            yield self._moment(base, at, wholes, [""], kept.head_backward, "head")
            base = attrs.evolve(base, logits=base.logits - kept.logits)
            now = attrs.evolve(base, activations=held - kept.stream)
            yield self._moment(now, at, wholes, [""], kept.norm_backward, "final norm")
            held -= kept.head - kept.head_deferred * at.splits
        done = [""] if chunk.part.is_last else []
        blocks = list(chunk.part.blocks)
        for index in reversed(range(len(blocks))):
            again = self._again(blocks, index)
            now = attrs.evolve(base, activations=held + again)
            unit = f"model.layers.{blocks[index]}"
            block = self._block(blocks[index])
            extra = block.extra_apart if at.splits else block.extra
            yield self._moment(now, at, wholes, [*done, unit], extra, f"block {blocks[index]}")
            done.append(unit)
            held -= self._share(blocks, index) - block.deferred * at.splits
        if chunk.part.is_first:
            now = attrs.evolve(base, activations=held)
            work = kept.stream + kept.table_gradient
            yield self._moment(now, at, wholes, [*done, ""], work, "embedding")

    def _moment(
        self,
        base: RankMemory,
        at: InFlight,
        wholes: _Gradients,
        done: Sequence[str],
        workspace: int,
        moment: str,
    ) -> RankMemory:
        return attrs.evolve(
            base,
            gathered=self._gathered(at.chunk),
            reduce=wholes.bytes_after(done),
            workspace=workspace + sum(self._transfers(chunk.part) for chunk in self.chunks),
            moment=moment,
        )

    def _block(self, number: int) -> BlockBytes:
        is_sparse = self.shape.is_sparse(number) and self.kept.sparse is not None
        return self.kept.sparse if is_sparse and self.kept.sparse else self.kept.dense

    def _stage(self, part: Slice) -> int:
        """Return what a microbatch keeps of a chunk, logits apart."""
        blocks = list(part.blocks)
        kept = self.kept
        held = sum(self._share(blocks, index) for index in range(len(blocks)))
        if part.is_last:
            held += kept.head
        else:
            held += kept.stream  # what was sent, from which its backward begins
        if not part.is_first and not (kept.segment or kept.keeps_stream):
            held += kept.stream  # what was received, for whose gradient the stage before waits
        return held

    def _deferred(self, part: Slice) -> int:
        """Return what a microbatch keeps of a chunk until its weight gradients are computed."""
        held = sum(self._block(number).deferred for number in part.blocks)
        return held + self.kept.head_deferred * part.is_last

    def _transfers(self, part: Slice) -> int:
        """Return what a stage expects, the next input and gradient, and what it has just sent."""
        return self.kept.stream * ((not part.is_first) + 2 * (not part.is_last))

    def _share(self, blocks: list[int], index: int) -> int:
        """Return what a block keeps until its backward."""
        segment, block = self.kept.segment, self._block(blocks[index])
        if not segment:
            return block.kept
        return self.kept.recomputed(block, is_first=index % segment == 0)

    def _again(self, blocks: list[int], index: int) -> int:
        """Return what is recomputed of a segment and still held when a block's backward begins."""
        segment = self.kept.segment
        if not segment:
            return 0
        first = index - index % segment
        made = (self._block(blocks[each]) for each in range(first, index + 1))
        held = sum(self.kept.again(block) for block in made)
        return held - (self.kept.stream if self.kept.keeps_stream else 0)

    def _gathered(self, chunk: int) -> int:
        """Return the bytes of weights that are whole beside what is kept of them."""
        if self.traffic.live_units is None:
            own = self.chunks[chunk : chunk + 1]
            every = [
                b for c in (self.chunks if self.traffic.all_chunks else own) for b in c.buckets
            ]
            return sum(b.whole_weights for b in every if b.is_gathered)
        sizes = _by_unit(
            (b.unit, b.whole_weights) for b in self.chunks[chunk].buckets if b.is_gathered
        )
        around = sum(size for unit, size in sizes.items() if "layers" not in unit)
        inner = sorted((size for unit, size in sizes.items() if "layers" in unit), reverse=True)
        return around + sum(inner[: self.traffic.live_units])


@attrs.frozen
class _Gradients:
    """Whole gradients of a rank's chunks during a backward."""

    chunks: tuple[Chunk, ...]
    at: InFlight
    traffic: Traffic

    def bytes_after(self, done: Sequence[str]) -> int:
        """Return their bytes when the backward has come to the last of these units."""
        own = self.at.chunk
        total = 0
        for number, chunk in enumerate(self.chunks):
            sizes = _by_unit((b.unit, b.whole_gradients) for b in chunk.buckets if b.is_lent)
            if self.traffic.reduce_each_backward:
                live = [sizes.get(unit, 0) for unit in done] if number == own else []
                total += sum(live[-self.traffic.live_reductions :])
            elif number in self.at.follows:
                total += sum(sizes.values())
            elif number == own:
                total += sum(sizes.get(unit, 0) for unit in done)
        return total + self._travelling(done)

    def _travelling(self, done: Sequence[str]) -> int:
        """Return the copies, in the format in which gradients travel, of those under way."""
        buckets = self.chunks[self.at.chunk].buckets
        sizes = _by_unit((b.unit, b.numel * self.traffic.wire_bytes) for b in buckets)
        return sum(sizes.get(unit, 0) for unit in done[-self.traffic.live_reductions :])


def _by_unit(sizes: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for unit, size in sizes:
        found[unit] = found.get(unit, 0) + size
    return found
