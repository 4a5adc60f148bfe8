"""What gives readers damaged inputs finds readers that are wrong, and says with which input."""

from __future__ import annotations

import json
import random
import warnings

import pytest

from tests.fuzz_table import table
from tests.fuzzing import BrokenError, Reader, check_input, fuzz
from tests.json_mutations import mutate_json, places
from tests.mutations import mutant, mutations

SEED = json.dumps({"size": 12, "items": [1, {"name": "a", "w": 1.5}], "none": None}).encode()


class OwnError(ValueError):
    pass


def read(data, then=lambda value: None):
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise OwnError("no JSON") from error
    if isinstance(value, dict) and type(value.get("size")) is int:
        then(value)
        return value
    raise OwnError("no object with a size")


def reader_that(then, **bounds):
    return Reader(lambda data: read(data, then), [SEED], (OwnError,), **bounds)


def test_a_reader_with_errors_of_its_own_accepts_some_inputs_and_refuses_others():
    summary = fuzz(Reader(read, [SEED], (OwnError,)), 500)
    assert summary.inputs == summary.accepted + summary.refused["OwnError"] == 500
    assert min(summary.accepted, summary.refused["OwnError"]) > 50


def raise_for_negative(value):
    if value["size"] < 0:
        raise KeyError("size")


def test_an_error_of_another_kind_is_shown_with_a_smaller_input_that_raises_it():
    with pytest.raises(BrokenError, match=r"KeyError: 'size'(?s:.)*shrunk to \d+ bytes") as caught:
        fuzz(reader_that(raise_for_negative), 5000)
    shrunk = str(caught.value).rsplit("bytes: b'", 1)[1][:-1]
    assert len(shrunk) < len(SEED)
    assert json.loads(shrunk)["size"] < 0


def test_the_number_in_the_message_makes_the_input_again():
    with pytest.raises(BrokenError) as caught:
        fuzz(reader_that(raise_for_negative), 5000, seed=3)
    number = int(str(caught.value).split()[1])
    assert json.loads(mutant([SEED], 3, number))["size"] < 0
    assert list(mutations([SEED], 3, 1, number)) == [mutant([SEED], 3, number)]


def loop(value):
    while value["size"] == 7:
        pass


def take(value):
    if value["size"] == 7:
        bytearray(1 << 30)


def warn(value):
    if value["size"] == 7:
        warnings.warn("seven", stacklevel=2)


def recurse(value):
    if value["size"] == 7:
        recurse(value)


def unprintable(value):
    if value["size"] == 7:
        raise OwnError("\ud800")


def silent(value):
    if value["size"] == 7:
        raise OwnError(" ")


def leave(value):
    if value["size"] == 7:
        raise SystemExit(1)


def count_up(value, seen=[]):  # noqa: B006
    seen.append(1)
    value["seen"] = len(seen)


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (loop, "stopped after 0.05 CPU seconds"),
        (take, "MemoryError"),
        (warn, "UserWarning: seven"),
        (recurse, "RecursionError"),
        (unprintable, "cannot be printed"),
        (silent, "a message of 1 letters"),
        (leave, "SystemExit: 1"),
        (count_up, "read again"),
    ],
)
def test_what_a_reader_must_not_do_is_named(then, message):
    reader = reader_that(then, most_seconds=0.05)
    with pytest.raises(BrokenError, match=message):
        check_input(reader, b'{"size": 7}')


def test_a_reader_that_refuses_a_sound_input_is_not_tried():
    with pytest.raises(OwnError):
        fuzz(Reader(read, [b"{}"], (OwnError,)), 10)


def test_a_reader_may_not_hide_the_time_it_takes():
    def read_all(data):
        while True:
            try:
                while True:
                    pass
            except Exception:
                return None

    with pytest.raises(BrokenError, match="CPU seconds"):
        check_input(Reader(read_all, [], (OwnError,), most_seconds=0.05), b"x")


def test_the_places_of_values_are_those_that_a_parser_finds():
    found = {SEED[place.begin : place.end] for place in places(SEED)}
    whole = json.loads(SEED)
    values = [whole, *whole.values(), *whole["items"], *whole["items"][1].values()]
    assert found == {json.dumps(value).encode() for value in values}
    keys = {SEED[place.key : place.key_end] for place in places(SEED) if place.key >= 0}
    assert keys == {b'"size"', b'"items"', b'"name"', b'"w"', b'"none"'}


def test_most_damage_to_json_is_json():
    made = [mutate_json(SEED, [SEED], random.Random(number)) for number in range(500)]
    sound = 0
    for data in made:
        try:
            json.loads(data)
        except (ValueError, RecursionError):
            continue
        sound += data != SEED
    assert sound > 400


def test_inputs_of_bytes_that_are_no_text_differ_and_stay_small():
    seed = random.Random(0).randbytes(300)
    made = list(mutations([seed, b""], 0, 500))
    assert len(set(made)) > 250
    assert max(map(len, made)) <= 1 << 17


def test_the_table_adds_the_parts_of_a_reader():
    part = {"inputs": 10, "accepted": 4, "refused": {"OwnError": 6}, "seconds": 0.5}
    lines = table([("a", part), ("b", part), ("a", part)]).splitlines()
    assert lines[1].split() == ["a", "20", "8", "1.0", "20", "OwnError", "12"]
    assert len(lines) == 3
