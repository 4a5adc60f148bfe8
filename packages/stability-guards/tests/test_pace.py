"""Slow ranks are named after several slow steps, and a silence is told once."""

import threading

import pytest

from trainwright.collectives import LocalWorld
from trainwright.stability_guards import (
    GuardError,
    Heartbeat,
    StragglerWatch,
    gather_seconds,
)


def test_a_rank_is_named_after_so_many_slow_observations_in_a_row():
    watch = StragglerWatch(factor=1.5, in_a_row=3)
    state, named = watch.initial(), []

    for seconds in [[1, 1, 2], [1, 1, 3], [1, 1, 2], [1, 1, 1], [1, 1, 2]]:
        state, found = watch.update(state, seconds)
        named.append([straggler.rank for straggler in found])

    assert named == [[], [], [2], [], []]


def test_a_straggler_says_how_slow_it_is():
    watch = StragglerWatch(in_a_row=1)

    _, found = watch.update(watch.initial(), [1.0, 4.0, 1.0, 2.0])

    assert [str(f) for f in found] == [
        "rank 1 takes 4 s, 2.67 times the median",
        "rank 3 takes 2 s, 1.33 times the median",
    ]


def test_a_rank_that_alone_takes_time_is_infinitely_slow():
    watch = StragglerWatch(in_a_row=1)

    _, found = watch.update(watch.initial(), [0.0, 0.0, 3.0])

    assert [str(f) for f in found] == ["rank 2 takes 3 s, inf times the median"]


def test_every_rank_learns_the_seconds_of_all():
    found = LocalWorld(3).run(lambda comm: gather_seconds(0.5 * comm.rank, comm))

    assert found == [[0.0, 0.5, 1.0]] * 3


def test_a_silence_is_told_once_and_a_beat_begins_anew():
    told, heard = [], threading.Event()

    def tell(silence):
        told.append(silence)
        heard.set()

    with Heartbeat(tell, factor=3.0, least_s=0.02) as heart:
        heart.beat(4)
        assert heard.wait(5.0)
        heard.clear()
        heart.beat(5)
        assert heard.wait(5.0)

    assert [silence.step for silence in told] == [4, 5]
    assert all(silence.seconds >= 0.02 for silence in told)
    assert "since step 4" in str(told[0])


def test_no_silence_is_told_before_the_first_beat_or_after_closing():
    told = []
    with Heartbeat(told.append, least_s=0.01):
        threading.Event().wait(0.05)
    heart = Heartbeat(told.append, least_s=0.05)
    heart.beat(0)
    heart.close()
    heart.close()
    threading.Event().wait(0.1)

    assert told == []


def test_the_one_who_is_told_may_close():
    done = threading.Event()
    hearts = []

    def tell(_):
        hearts[0].close()
        done.set()

    hearts.append(Heartbeat(tell, least_s=0.02))
    hearts[0].beat(1)

    assert done.wait(5.0)


def test_a_watch_of_no_observation_is_refused():
    with pytest.raises(GuardError, match="in_a_row must be a whole number from 1"):
        StragglerWatch(in_a_row=0)
