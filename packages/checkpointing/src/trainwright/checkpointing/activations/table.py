"""What a transformer layer saves for its backward, operator by operator: a table of bytes.

Two kernels of each layer. ``fused``: each operator saves what its gradient cannot do without, one
byte a dropped element, so that the sums are the closed forms of the literature. ``eager``: what
PyTorch saves where norms and dropout are written in plain operators, as on CPU; masks then take an
element of the activations' dtype, and the composite RMS norm keeps two float32 copies.
"""

# Letters: b batch, s sequence, h hidden, a heads, g key/value heads, f width of the MLP,
# t tensor-parallel ranks.

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import attrs

from trainwright.checkpointing.errors import PolicyError

_KERNELS = ("fused", "eager")


@attrs.frozen
class LayerShape:
    """Sizes of a transformer layer.

    Args:
        batch: Sequences in a microbatch.
        sequence: Positions of a sequence.
        hidden: Width of the residual stream.
        heads: Attention heads, which share ``hidden``.
        kv_heads: Key and value heads; None means as many.
        mlp: Inner width of the MLP; None means 4 * hidden.
        element_bytes: Bytes of an activation, 2 for the 16-bit formats.

    Raises:
        PolicyError: A size is no positive whole number, or heads do not divide.
    """

    batch: int
    sequence: int
    hidden: int
    heads: int
    kv_heads: int | None = None
    mlp: int | None = None
    element_bytes: int = 2

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(LayerShape):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if type(value) is not int or value < 1:
                raise PolicyError(f"{field.name} must be a positive whole number, got {value!r}")
        if self.hidden % self.heads or self.heads % (self.kv_heads or self.heads):
            raise PolicyError(
                f"heads={self.heads} must divide hidden={self.hidden} and be a multiple of "
                f"kv_heads={self.kv_heads}"
            )

    @property
    def stream(self) -> int:
        """Elements of the residual stream: s * b * h."""
        return self.batch * self.sequence * self.hidden

    @property
    def inner(self) -> int:
        """Elements within the MLP: s * b * f."""
        return self.batch * self.sequence * (self.mlp or 4 * self.hidden)

    @property
    def keys(self) -> int:
        """Elements of the keys, and of the values: s * b * h * g / a."""
        return self.stream // self.heads * (self.kv_heads or self.heads)

    @property
    def scores(self) -> int:
        """Elements of the attention matrices: a * s^2 * b."""
        return self.batch * self.heads * self.sequence**2

    @property
    def rows(self) -> int:
        """Positions: s * b."""
        return self.batch * self.sequence


@attrs.frozen
class Saved:
    """One tensor that an operator saves.

    Args:
        operator: Who saves it.
        tensor: What it is.
        num_bytes: Bytes on one rank without tensor parallelism.
        shared: "tp": each tensor-parallel rank has its part. "sp": it has one under sequence
            parallelism, else all of it.
        part: What recomputes it: "core" for the attention core, "activation" for the MLP's
            activation function, "norm" for norms, "" for what products of matrices need.
    """

    operator: str
    tensor: str
    num_bytes: int
    shared: str
    part: str = ""


def gpt_layer(
    shape: LayerShape, kernel: str = "fused", *, flash: bool = False
) -> tuple[Saved, ...]:
    """Return what a layer of GPT saves: layer norms, GELU, dropout after attention and MLP.

    Fused in 16 bits with f = 4h it is s*b*h * (34 + 5*a*s/h) bytes.

    Args:
        shape: Sizes; all heads have keys and values of their own.
        kernel: ``fused`` or ``eager``.
        flash: The attention core is one kernel that saves a log-sum-exp instead of matrices.

    Source: Korthikanti et al. (arXiv 2205.05198), section 4.
    """
    _check_kernel(kernel)
    size, mask = shape.element_bytes, 1 if kernel == "fused" else shape.element_bytes
    stream = shape.stream * size
    rows = [
        Saved("attention norm", "input", stream, "sp"),
        *_statistics("attention norm", 2 * size, shape, kernel),
        Saved("query, key and value product", "input", stream, "sp"),
        *_core(shape, mask, flash=flash, dropout=True),
        Saved("attention output product", "input", stream, "tp"),
        Saved("attention dropout", "mask", shape.stream * mask, "sp"),
        Saved("mlp norm", "input", stream, "sp"),
        *_statistics("mlp norm", 2 * size, shape, kernel),
        Saved("up product", "input", stream, "sp"),
        Saved("gelu", "input", shape.inner * size, "tp"),
        Saved("down product", "input", shape.inner * size, "tp", "activation"),
        Saved("mlp dropout", "mask", shape.stream * mask, "sp"),
    ]
    return tuple(rows)


def llama_layer(
    shape: LayerShape, kernel: str = "fused", *, flash: bool = True
) -> tuple[Saved, ...]:
    """Return what a layer of Llama saves: RMS norms, rotary positions, a gated MLP, no dropout.

    Fused in 16 bits it is s*b*h * (12 + 4*g/a + 8*f/h) + 4*a*s*b bytes.

    Args:
        shape: Sizes.
        kernel: ``fused`` or ``eager``.
        flash: The attention core is one kernel that saves a log-sum-exp instead of matrices.
    """
    _check_kernel(kernel)
    size = shape.element_bytes
    stream, inner = shape.stream * size, shape.inner * size
    rows = [
        *_rms_norm("attention norm", shape, kernel),
        Saved("query, key and value product", "input", stream, "sp"),
        *_core(shape, 0, flash=flash, dropout=False),
        Saved("attention output product", "input", stream, "tp"),
        *_rms_norm("mlp norm", shape, kernel),
        Saved("gate and up product", "input", stream, "sp"),
        Saved("silu", "input", inner, "tp"),
        Saved("gating", "silu of the gate", inner, "tp", "activation"),
        Saved("gating", "up", inner, "tp"),
        Saved("down product", "input", inner, "tp"),
    ]
    return tuple(rows)


def saved_bytes(
    rows: Iterable[Saved], *, tp: int = 1, sp: bool = False, recompute: Iterable[str] = ()
) -> int:
    """Return the bytes that a rank saves of a layer, rounded up.

    Args:
        rows: Of `gpt_layer` or `llama_layer`.
        tp: Tensor-parallel ranks.
        sp: Whether they share the sequence out between products.
        recompute: Parts that are recomputed: "core", "activation", "norm".

    Raises:
        PolicyError: ``tp`` is no positive whole number, or a part is unknown.
    """
    if type(tp) is not int or tp < 1:
        raise PolicyError(f"tp must be a positive whole number, got {tp!r}")
    parts = frozenset(recompute)
    if unknown := parts - {"core", "activation", "norm"}:
        raise PolicyError(f"parts that can be recomputed are core, activation, norm, got {unknown}")
    total = Fraction(0)
    for row in rows:
        if not row.part or row.part not in parts:
            total += Fraction(row.num_bytes, tp if sp or row.shared == "tp" else 1)
    return -(-total.numerator // total.denominator)


def input_bytes(shape: LayerShape, *, tp: int = 1, sp: bool = False) -> int:
    """Return what full recomputation keeps of a layer: its input, on every rank without sp."""
    return -(-shape.stream * shape.element_bytes // (tp if sp else 1))


def _core(shape: LayerShape, mask: int, *, flash: bool, dropout: bool) -> list[Saved]:
    size = shape.element_bytes
    rows = [
        Saved("attention core", "query", shape.stream * size, "tp"),
        Saved("attention core", "key", shape.keys * size, "tp"),
        Saved("attention core", "value", shape.keys * size, "tp"),
    ]
    if flash:
        # The output is the input of the next product, so it counts there.
        lse = 4 * shape.heads * shape.rows
        return [*rows, Saved("attention core", "log-sum-exp", lse, "tp", "core")]
    rows.append(Saved("softmax", "output", shape.scores * size, "tp", "core"))
    if dropout:
        rows.append(Saved("dropout of scores", "mask", shape.scores * mask, "tp", "core"))
        rows.append(Saved("dropout of scores", "output", shape.scores * size, "tp", "core"))
    return rows


def _rms_norm(name: str, shape: LayerShape, kernel: str) -> list[Saved]:
    if kernel == "fused":
        return [Saved(name, "input", shape.stream * shape.element_bytes, "sp", "norm")]
    wide = max(4, shape.element_bytes)
    # In float32 the input is its own wide copy.
    rows = [Saved(name, "input in float32", shape.stream * wide, "sp", "norm")]
    rows.append(Saved(name, "normalised in float32", shape.stream * wide, "sp", "norm"))
    return [*rows, *_statistics(name, wide, shape, kernel)]


def _statistics(name: str, row_bytes: int, shape: LayerShape, kernel: str) -> list[Saved]:
    if kernel == "fused":  # left out by closed forms: s * b numbers
        return []
    return [Saved(name, "statistics", row_bytes * shape.rows, "sp", "norm")]


def _check_kernel(kernel: str) -> None:
    if kernel not in _KERNELS:
        raise PolicyError(f"a table is of kernel fused or eager, got {kernel!r}")
