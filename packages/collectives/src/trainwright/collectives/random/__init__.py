"""Random numbers by place: every element of a global tensor has its own number.

A number depends on a `Key` and on the element's position in the global tensor, on nothing else:
not on rank, layout, device, threads or torch's generators, which are neither read nor changed. Any
rank computes any slice of a tensor without the rest and gets what every other rank would get.

Philox-4x32-10 turns a counter of four 32-bit words under a key of two into four random words:

- the key words are the low and high half of ``blake2b-64(seed as 8 little-endian bytes, name)``;
- the counter words are the low and high half of the block number, the low 32 bits of the step, and
  ``step >> 32`` plus the attempt shifted left by 16 (attempts above 0 serve `integers` only);
- a block serves two elements: element ``i`` belongs to block ``i // 2`` and has its words 0 and 1
  where ``i`` is even, 2 and 3 where it is odd, joined (first word high) to 64 bits.

`words` draws 32 bits only: element ``i`` is word ``i % 4`` of block ``i // 4``.

A uniform number is the upper 53 of these bits divided by 2**53. The two normal numbers of a block
are the Box-Muller transform of its two uniform numbers. All draws are computed in float64, from
operations that IEEE 754 rounds correctly, and rounded to the asked dtype at the end: runs in
float32 and float64 begin with the same numbers, on CPU and on GPU. Different kinds of draws under
one key use the same bits: give what must be independent different names or steps.
"""

from .draws import bernoulli, normal, normal_at, uniform, uniform_at
from .integers import integers, permutation
from .key import Key
from .philox import philox_4x32_10
from .words import words

__all__ = [
    "Key",
    "bernoulli",
    "integers",
    "normal",
    "normal_at",
    "permutation",
    "philox_4x32_10",
    "uniform",
    "uniform_at",
    "words",
]
