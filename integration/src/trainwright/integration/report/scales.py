"""Axes: from numbers to places on a picture, and the round numbers to write beside them."""

from __future__ import annotations

import math
from itertools import pairwise

import attrs


@attrs.frozen
class Scale:
    """One axis.

    Args:
        least: number at its beginning.
        greatest: number at its end, greater.
        start: place of its beginning, in pixels.
        stop: place of its end, which may be less: upwards.
        logarithmic: whether equal factors are equal lengths; then ``least`` is positive.
    """

    least: float
    greatest: float
    start: float
    stop: float
    logarithmic: bool = False

    def place(self, number: float) -> float:
        """Return where a number is."""
        least, greatest = self.least, self.greatest
        if self.logarithmic:
            least, greatest, number = math.log(least), math.log(greatest), math.log(number)
        return self.start + (number - least) / (greatest - least) * (self.stop - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Return round numbers on the axis, at most so many but two where two are there."""
        if self.logarithmic:
            found = _round_factors(self.least, self.greatest, most)
            if len(found) >= 2:
                return found
        return _round_steps(self.least, self.greatest, most)


def scale_of(values: list[float], start: float, stop: float, *, logarithmic: bool = False) -> Scale:
    """Return an axis that holds all values with a little room, also where all are the same."""
    least, greatest = min(values), max(values)
    if logarithmic:
        room = (greatest / least) ** 0.04 if greatest / least > 1.001 else 1.2
        return Scale(least / room, greatest * room, start, stop, logarithmic=True)
    room = 0.04 * (greatest - least)
    if room <= 1e-9 * max(abs(least), abs(greatest)):
        room = 0.1 * abs(least) or 1.0
    return Scale(least - room, greatest + room, start, stop)


def tick_texts(numbers: list[float], *, logarithmic: bool = False) -> list[str]:
    """Return the numbers of one axis' ticks, all written in one way and told apart."""
    sizes = [abs(number) for number in numbers if number]
    if not sizes:
        return ["0" for _ in numbers]
    if max(sizes) < 0.01 or max(sizes) >= 1e15 or (logarithmic and min(sizes) < 1e-3):
        return [_with_exponent(number) for number in numbers]
    if logarithmic:
        return [_with_letter(number, number / 10) for number in numbers]
    apart = min((b - a for a, b in pairwise(numbers)), default=sizes[0])
    return [_with_letter(number, apart, max(sizes)) for number in numbers]


def _with_exponent(number: float) -> str:
    if number == 0:
        return "0"
    digits, _, power = f"{number:.3e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def _with_letter(number: float, apart: float, size: float | None = None) -> str:
    if number == 0:
        return "0"
    size = abs(number) if size is None else size
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= factor:
            return f"{number / factor:.{_digits(apart / factor)}f}{letter}"
    return f"{number:.{_digits(apart)}f}"


def short(number: float, digits: int = 4) -> str:
    """Return a number for a person, in so many digits."""
    if not math.isfinite(number):
        return "not finite"
    size = abs(number)
    if size == 0 or 1e-3 <= size < 1e4:
        text = f"{number:.{digits}g}"
        return text if "e" not in text else f"{number:.0f}"
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if factor <= size < factor * 1e3:
            return f"{number / factor:.{digits}g}{letter}"
    return f"{number:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e")


def _digits(step: float) -> int:
    return max(0, math.ceil(-math.log10(step) - 1e-9)) if step > 0 else 0


def _round_steps(least: float, greatest: float, most: int) -> list[float]:
    rough = (greatest - least) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(least / step - 1e-9), math.floor(greatest / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _round_factors(least: float, greatest: float, most: int) -> list[float]:
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(greatest)) + 1)
    for factors in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [10.0**power * factor for power in powers for factor in factors]
        kept = [number for number in found if least <= number <= greatest]
        if len(kept) <= most:
            return kept
    every = -(-len(kept) // most)
    return [number for number in kept if round(math.log10(number)) % every == 0]
