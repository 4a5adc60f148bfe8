"""Plain values and the state dictionaries of PyTorch come back equal in value and type."""

import json
import random
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from trainwright.checkpointing.errors import MismatchError
from trainwright.checkpointing.state import StateStore
from trainwright.checkpointing.state.plain import decode_plain, dump_plain, encode_plain
from trainwright.checkpointing.testing.files import CrashingFiles

TAGS = ["__float__", "__tuple__", "__size__", "__items__", "__counter__", "__dtype__", "__numpy__"]
NUMBERS = st.sampled_from("?bhilBHILefdFD").flatmap(
    lambda code: st.binary(min_size=16, max_size=16).map(
        lambda data: np.frombuffer(b"\x01" if code == "?" else data, dtype=code)[0]
    )
)
KEYS = st.text(max_size=3) | st.sampled_from(TAGS) | st.integers() | st.none() | st.booleans()
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**64, 2**300)
    | st.floats()
    | st.text()
    | st.sampled_from([torch.float8_e4m3fn, torch.int64, torch.bool])
    | NUMBERS
    | st.dictionaries(st.text(max_size=2) | st.integers(), st.integers(0)).map(Counter)
    | st.lists(st.integers(0)).map(torch.Size),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS | st.tuples(KEYS), inner, max_size=3)
    ),
    max_leaves=8,
)


def _store():
    return StateStore("/runs/a", files=CrashingFiles(), block_bytes=16)


def _same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, np.generic):
        return a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return a.hex() == b.hex()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, (dict, Counter)):
        return all(map(_same, a.keys(), b.keys())) and all(map(_same, a.values(), b.values()))
    return bool(a == b)


@given(value=PLAIN)
def test_a_plain_value_comes_back_equal_in_value_type_and_order(value):
    encoded = encode_plain("x", value)
    assert _same(decode_plain(json.loads(json.dumps(encoded, allow_nan=False))), value)
    assert dump_plain({"x": encoded}) == dump_plain({"x": encode_plain("x", value)})


@given(value=PLAIN, items=st.lists(st.dictionaries(st.text(), PLAIN, max_size=3), max_size=2))
def test_plain_values_in_a_tree_come_back_from_a_store(value, items):
    store = _store()
    store.save(0, {"value": [value], "deep": {"items": items}})
    loaded = store.load({"value": None, "deep": {"items": None}})
    assert _same(loaded, {"value": [value], "deep": {"items": items}})


@pytest.mark.parametrize(
    "value",
    [
        {"__float__": "1.0"},
        {"__float__": ["nan"]},
        {"__tuple__": {"a": 1}},
        {"__tuple__": [], "b": 1},
        {"__size__": ["a"]},
        {"__items__": [[[1], 2]]},
        {"__items__": [[1, 2], [1, 3]]},
        {"__items__": [1]},
        {"__counter__": 3},
        {"__dtype__": "load"},
        {"__dtype__": []},
        {"__numpy__": ["|O", "00"]},
        {"__numpy__": ["<f8", "00"]},
        {"__numpy__": ["<f8", "00" * 16]},
        {"__numpy__": ["<f8", 3]},
        {"__numpy__": 3},
    ],
)
def test_objects_that_no_value_is_written_as_are_refused(value):
    with pytest.raises(ValueError, match="is no plain value"):
        decode_plain([value])


def _train(optimizer, model, steps=2):
    for step in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = model(torch.full((3, 4), 0.5 + step)).square().sum()  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)


def _model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW with lr as a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "Adafactor": torch.optim.Adafactor,
    "Rprop": torch.optim.Rprop,
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_state_dict_of_an_optimizer_resumes_as_if_it_had_never_stopped(make):
    model, other, store = _model(0), _model(1), _store()
    optimizer, resumed = make(model.parameters()), make(other.parameters())
    _train(optimizer, model)
    _train(resumed, other)  # it has states to be filled then

    store.save(2, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    target = {"model": other.state_dict(), "optimizer": resumed.state_dict()}
    loaded = store.load(target)
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])

    groups = loaded["optimizer"]["param_groups"]
    assert [type(x) for x in groups[0].values()] == [
        type(x) for x in optimizer.state_dict()["param_groups"][0].values()
    ]
    _train(optimizer, model)
    _train(resumed, other)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


SCHEDULERS = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.MultiStepLR(o, [2])], [3]
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_the_state_dict_of_a_scheduler_comes_back_equal_in_value_and_type(make):
    store = _store()
    schedule = make(torch.optim.SGD(_model(0).parameters(), 0.1))
    store.save(0, {"schedule": schedule.state_dict()})
    fresh = make(torch.optim.SGD(_model(0).parameters(), 0.1))
    loaded = store.load({"schedule": fresh.state_dict()})["schedule"]
    assert _same(loaded, schedule.state_dict())
    fresh.load_state_dict(loaded)


def test_random_states_of_python_numpy_and_torch_come_back():
    store = _store()
    generator, numbers = torch.Generator().manual_seed(3), np.random.default_rng(3)
    old, python = np.random.RandomState(3), random.Random(3)

    def state():
        return {
            "torch": generator.get_state(),
            "numpy": numbers.bit_generator.state,
            "old numpy": old.get_state(),
            "python": python.getstate(),
            "all devices": [generator.get_state(), generator.get_state()],
        }

    def draw():
        drawn = torch.rand(3, generator=generator), numbers.random(3), old.rand(3)
        return [*map(float, torch.cat([torch.as_tensor(x) for x in drawn])), python.random()]

    store.save(0, state())
    expected = draw()
    loaded = store.load(state())
    generator.set_state(loaded["torch"])
    numbers.bit_generator.state = loaded["numpy"]
    old.set_state(loaded["old numpy"])
    python.setstate(loaded["python"])
    assert draw() == expected
    assert [type(x) for x in loaded["all devices"]] == [torch.Tensor] * 2


def test_a_numpy_array_is_filled_in_place_and_may_be_read_only_at_the_save_only():
    store = _store()
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    target = np.zeros((2, 3), dtype=np.float32)
    locked = array.T
    locked.flags.writeable = False
    store.save(0, {"a": array, "b": locked})

    loaded = store.load({"a": target, "b": np.zeros((3, 2), dtype=np.float32)})

    assert loaded["a"] is target
    assert np.array_equal(target, array)
    assert np.array_equal(loaded["b"], locked)


def test_lists_of_tensors_are_part_of_the_tree_and_keep_their_types():
    store = _store()
    state = nn.Linear(2, 1).state_dict()
    store.save(0, {"ema": [(torch.ones(2), 0.9), state], 7: {3: "x"}})
    target = {"ema": [(torch.zeros(2), None), nn.Linear(2, 1).state_dict()], 7: {3: None}}

    loaded = store.load(target)

    (average, decay), weights = loaded["ema"]
    assert type(loaded["ema"][0]) is tuple
    assert average is target["ema"][0][0]
    assert (average.tolist(), decay, loaded[7]) == ([1, 1], 0.9, {3: "x"})
    assert type(weights) is OrderedDict
    assert weights._metadata == state._metadata
    with pytest.raises(MismatchError, match="ema/2: expected a tensor, found nothing"):
        store.load({"ema": [*target["ema"], torch.ones(1)], 7: {3: None}})
