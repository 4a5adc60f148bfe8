"""Gives a reader of outside bytes many damaged inputs, and accepts its own errors only.

A reader returns a value or raises one of the errors that it may. All else is a failure: another
exception, a warning, an input that takes seconds or hundreds of megabytes, an error whose message
cannot be printed, a value that is another one when it is read again. A failure names the number of
the input, from which ``mutant(seeds, seed, number)`` makes it again, and shows a shrunk one.

    reader = Reader(read_settings, [b'{"steps": 3}'], (SettingsError,))
    print(fuzz(reader, count=100_000))
"""

from __future__ import annotations

import collections
import contextlib
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import attrs

from tests.mutations import mutant

PARTS = 20  # of a long test: each stays under the time after which pytest ends a test
SAMPLE = 100  # inputs a reader in the suites that run by default

_SHRINK_S = 20.0
_SHOWN_BYTES = 600
_MAX_MESSAGE = 10_000  # letters, and what the input itself might take when it is shown
_WALL_FACTOR = 20  # a machine under load is slow; CPU seconds are the reader's own


def _equal(first: object, second: object) -> bool:
    return bool(first == second) or repr(first) == repr(second)  # NaN is not equal to itself


@attrs.frozen
class Reader:
    """What is to be read, and what may come of it.

    Args:
        read: Reads an input; what it returns is compared when it is read again.
        seeds: Sound inputs, which ``read`` must accept.
        allowed: The errors that it may raise.
        equal: Whether two values read of one input are the same.
        most_seconds: CPU seconds that an input may take.
        most_bytes: Memory that an input may take, on top of what the process has.
    """

    read: Callable[[bytes], object]
    seeds: Sequence[bytes]
    allowed: tuple[type[Exception], ...]
    equal: Callable[[object, object], bool] = _equal
    most_seconds: float = 2.0
    most_bytes: int = 1 << 28


@attrs.frozen
class Summary:
    """What became of the inputs: how many were accepted, and refused by which error."""

    inputs: int
    accepted: int
    refused: dict[str, int]
    seconds: float


class BrokenError(AssertionError):
    """A reader did with an input what it must not."""


class _TakesTooLong(BaseException):  # no reader that catches Exception may hide it
    """An input has taken its time."""


def fuzz(reader: Reader, count: int, *, seed: int = 0, first: int = 0) -> Summary:
    """Give a reader ``count`` damaged inputs, from number ``first`` on.

    Raises:
        BrokenError: The reader did what it must not; the message says with which input.
    """
    accepted, refused = 0, collections.Counter[str]()
    began = time.perf_counter()
    with _bounded(reader):
        for sound in reader.seeds:
            reader.read(sound)
        for index in range(first, first + count):
            data = mutant(reader.seeds, seed, index)
            problem, error = _try(reader, data)
            if problem is not None:
                raise BrokenError(_report(reader, data, problem, f"input {index} of seed {seed}"))
            if error is None:
                accepted += 1
            else:
                refused[error] += 1
    return Summary(count, accepted, dict(refused), time.perf_counter() - began)


def check_input(reader: Reader, data: bytes) -> str | None:
    """Return None if an input is accepted, or the name of the allowed error that it raises.

    Raises:
        BrokenError: As `fuzz`.
    """
    with _bounded(reader):
        problem, error = _try(reader, data)
        if problem is not None:
            raise BrokenError(_report(reader, data, problem, "this input"))
    return error


@attrs.frozen
class _Problem:
    """What went wrong; ``kind`` is alike for inputs that fail alike."""

    kind: tuple[str, ...]
    text: str


def _try(reader: Reader, data: bytes) -> tuple[_Problem | None, str | None]:
    """Return what went wrong, or the allowed error's name."""
    peak = _peak_bytes()
    try:
        with _timed(reader.most_seconds):
            value = reader.read(data)
            again = reader.read(data)
        if not reader.equal(value, again):
            text = f"read once: {value!r:.500}\nread again: {again!r:.500}"
            return _Problem(("other value",), text), None
        error = None
    except reader.allowed as caught:
        problem = _unprintable(caught, _MAX_MESSAGE + 10 * len(data))
        if problem is not None:
            return problem, None
        error = type(caught).__name__
    except KeyboardInterrupt:
        raise
    except BaseException as caught:  # SystemExit as well
        return _problem_of(caught), None
    grown = _peak_bytes() - peak
    if grown > reader.most_bytes:
        return _Problem(("memory",), f"it took {grown >> 20} MiB of memory"), None
    return None, error


def _unprintable(error: Exception, max_letters: int) -> _Problem | None:
    """Return what is wrong with an error's message, if anything."""
    text = str(error)
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        return _Problem(("message",), f"{type(error).__name__} cannot be printed: {cause}")
    if not text.strip() or len(text) > max_letters:
        shown = f"{type(error).__name__} has a message of {len(text)} letters: {text[:300]}"
        return _Problem(("message",), shown)
    return None


def _problem_of(error: BaseException) -> _Problem:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    shown = "".join(traceback.format_exception(error, limit=-12))[-6000:]
    # A time limit strikes anywhere: such inputs are alike wherever they were stopped.
    place = "" if isinstance(error, _TakesTooLong | RecursionError) else where
    return _Problem((type(error).__name__, place), shown)


def _report(reader: Reader, data: bytes, problem: _Problem, which: str) -> str:
    smallest, seen = _shrink(reader, data, problem)
    shown = smallest if len(smallest) <= _SHOWN_BYTES else smallest[:_SHOWN_BYTES] + b"..."
    return (
        f"{which}, {len(data)} bytes, is neither read nor refused as it should be\n"
        f"{seen.text}\nshrunk to {len(smallest)} bytes: {shown!r}"
    )


def _shrink(reader: Reader, data: bytes, problem: _Problem) -> tuple[bytes, _Problem]:
    """Remove what can be removed while the input fails alike, for a limited time."""
    until = time.monotonic() + _SHRINK_S
    size = len(data) // 2
    while size and time.monotonic() < until:
        at = 0
        while at < len(data) and time.monotonic() < until:
            smaller = data[:at] + data[at + size :]
            found, _ = _try(reader, smaller)
            if found is not None and found.kind == problem.kind:
                data, problem = smaller, found
            else:
                at += size
        size //= 2
    return data, problem


@contextlib.contextmanager
def _timed(seconds: float) -> Iterator[None]:
    """Stop what takes more CPU seconds than given, or many times as long by the clock."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * _WALL_FACTOR)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextlib.contextmanager
def _bounded(reader: Reader) -> Iterator[None]:
    """Make warnings errors, timers exceptions, and memory beyond the bound a MemoryError."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TakesTooLong(f"stopped after {reader.most_seconds} CPU seconds")

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    # Twice: memory that is only reserved is cheap, and the allocator reserves ahead.
    resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() + 2 * reader.most_bytes, hard))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in before.items():
            signal.signal(number, handler)


def _mapped_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
