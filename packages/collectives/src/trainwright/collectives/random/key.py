"""What a family of random numbers is called."""

from __future__ import annotations

import hashlib
import operator

import attrs

from trainwright.collectives.errors import UsageError

_SEED_BITS = 64
_STEP_BITS = 48


@attrs.frozen
class Key:
    """The name of one random tensor: equal keys give equal numbers, different ones independent.

    Args:
        seed: The run's seed, 0 to 2**64 - 1.
        name: What the numbers are for, such as a parameter's full name.
        step: Which of the tensors of that name, such as a training step; 0 to 2**48 - 1.

    Raises:
        UsageError: A number is out of its range or not an integer.
    """

    seed: int
    name: str
    step: int = 0

    def __attrs_post_init__(self) -> None:
        _check_range("seed", self.seed, _SEED_BITS)
        _check_range("step", self.step, _STEP_BITS)
        if not isinstance(self.name, str):
            raise UsageError(f"a random key's name must be a string, got {self.name!r}")

    @property
    def words(self) -> tuple[int, int]:
        """The two 32-bit key words, the same in every process and version of Python."""
        text = self.seed.to_bytes(8, "little") + self.name.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _check_range(field: str, value: int, bits: int) -> None:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise UsageError(f"a random key's {field} must be an integer, got {value!r}") from error
    if not 0 <= number < 2**bits:
        raise UsageError(f"a random key's {field} must be 0 to 2**{bits} - 1, got {number}")
