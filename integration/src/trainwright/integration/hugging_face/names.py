"""Where each of our tensors lies in the files of a family: names, blocks, transpositions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from trainwright.collectives import Box
from trainwright.sharding.expert.names import ExpertNames

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@attrs.frozen
class Place:
    """A block of one of our tensors, and the block of a tensor in a file that it is.

    Args:
        name: of the tensor in the file.
        shape: its whole shape.
        box: the block there.
        ours: the block of our tensor; it may have leading dims of size 1 that the file has not.
        transposed: whether rows there are columns here.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    ours: Box
    transposed: bool = False

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], transposed: bool = False) -> Place:
        """Return the place of a tensor that is one there too."""
        there = shape[::-1] if transposed else shape
        return cls(name, there, Box.full(there), Box.full(shape), transposed)

    def there(self, ours: Box) -> Box:
        """Return where a part of this block, in our coordinates, is in the file."""
        start, stop = (self._turn(ours.start, self.ours), self._turn(ours.stop, self.ours))
        return Box(_add(start, self.box.start), _add(stop, self.box.start))

    def here(self, box: Box) -> Box:
        """Return where a part of this block, in the file's coordinates, is in our tensor."""
        missing = len(self.ours.start) - len(self.shape)
        start, stop = (_subtract(corner, self.box.start) for corner in (box.start, box.stop))
        if self.transposed:
            start, stop = start[::-1], stop[::-1]
        start, stop = (0,) * missing + start, (1,) * missing + stop
        return Box(_add(start, self.ours.start), _add(stop, self.ours.start))

    def _turn(self, corner: tuple[int, ...], origin: Box) -> tuple[int, ...]:
        missing = len(origin.start) - len(self.shape)
        inner = _subtract(corner, origin.start)[missing:]
        return inner[::-1] if self.transposed else inner


@attrs.frozen
class Naming:
    """What a family calls our tensors.

    Args:
        renames: pairs of a part of our names and theirs, replaced in turn.
        experts: what it calls the matrices of an expert, which lie apart in its files.
        fused: the tensor that holds queries, keys and values, side by side; None: they lie apart.
        transposed: whether matrices of blocks are stored with their inputs along rows.
        left_out: what names of tensors that nobody needs end with.
    """

    renames: tuple[tuple[str, str], ...] = ()
    experts: ExpertNames | None = None
    fused: str | None = None
    transposed: bool = False
    left_out: tuple[str, ...] = (".rotary_emb.inv_freq",)

    def places(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Place, ...]]:
        """Return where each tensor of the whole model lies.

        Args:
            shapes: of all our tensors, by name.
        """
        return {name: tuple(self._of(name, shapes)) for name in shapes}

    def rename(self, name: str) -> str:
        """Return the family's name of one of our tensors that is one there too."""
        for ours, theirs in self.renames:
            name = name.replace(ours, theirs)
        return name

    def _of(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Place]:
        shape = shapes[name]
        if self.experts is not None and name.endswith(GATE_UP):
            yield from _stack(self.rename(name.removesuffix("gate_up_proj")), self.experts, shape)
            return
        if self.experts is not None and name.endswith(DOWN):
            prefix = self.rename(name.removesuffix("down_proj"))
            for number in range(shape[0]):
                ours = Box((number, 0, 0), (number + 1, *shape[1:]))
                file = f"{prefix}{number}.{self.experts.down}.weight"
                yield Place(file, shape[1:], Box.full(shape[1:]), ours)
            return
        which = next((part for part in QKV if part in name), None)
        if self.fused is not None and which is not None:
            yield self._fused(name, which, shapes)
            return
        turned = self.transposed and len(shape) == 2 and name.endswith("_proj.weight")
        yield Place.whole(self.rename(name), shape, turned)

    def _fused(self, name: str, which: str, shapes: Mapping[str, tuple[int, ...]]) -> Place:
        assert self.fused is not None
        rows = [shapes[name.replace(which, part)][0] for part in QKV]
        first = sum(rows[: QKV.index(which)])
        last = first + rows[QKV.index(which)]
        shape = shapes[name]
        file = self.rename(name.replace(which, self.fused))
        if len(shape) == 1:
            return Place(file, (sum(rows),), Box((first,), (last,)), Box.full(shape))
        columns = shape[1]
        box = Box((0, first), (columns, last))
        return Place(file, (columns, sum(rows)), box, Box.full(shape), transposed=True)


def _stack(prefix: str, names: ExpertNames, shape: tuple[int, ...]) -> Iterator[Place]:
    experts, rows, width = shape
    half = rows // 2
    for number in range(experts):
        for matrix, first in ((names.gate, 0), (names.up, half)):
            ours = Box((number, first, 0), (number + 1, first + half, width))
            file = f"{prefix}{number}.{matrix}.weight"
            yield Place(file, (half, width), Box.full((half, width)), ours)


def _add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _subtract(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))


_APART = ExpertNames("gate_proj", "up_proj", "down_proj")
PLAIN_NAMES = Naming()
QWEN_NAMES = Naming(experts=_APART)
DEEPSEEK_NAMES = Naming((("mlp.shared_expert.", "mlp.shared_experts."),), experts=_APART)
MIXTRAL_NAMES = Naming(
    (("mlp.gate.", "block_sparse_moe.gate."), ("mlp.experts.", "block_sparse_moe.experts.")),
    experts=ExpertNames("w1", "w3", "w2"),
)
GPT2_NAMES = Naming(
    (
        ("model.embed_tokens.", "transformer.wte."),
        ("model.embed_positions.", "transformer.wpe."),
        ("model.norm.", "transformer.ln_f."),
        ("model.layers.", "transformer.h."),
        ("input_layernorm.", "ln_1."),
        ("post_attention_layernorm.", "ln_2."),
        ("self_attn.o_proj.", "attn.c_proj."),
        ("self_attn.", "attn."),
        ("mlp.up_proj.", "mlp.c_fc."),
        ("mlp.down_proj.", "mlp.c_proj."),
    ),
    fused="self_attn.c_attn",
    transposed=True,
    left_out=(".attn.bias", ".attn.masked_bias"),
)
