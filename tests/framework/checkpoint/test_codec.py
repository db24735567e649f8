"""State becomes strict JSON and tensors, and comes back exactly."""

from __future__ import annotations

import datetime
import enum
import json
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy
import pytest
import torch
from messages import refuses

from phalanx.framework.checkpoint import codec
from phalanx.framework.checkpoint.manifest import JSON
from phalanx.framework.core.errors import CheckpointError, ConfigurationError

Pair = namedtuple("Pair", "first second")


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


def through_json(document: JSON) -> JSON:
    return json.loads(json.dumps(document, allow_nan=False))


def round_trip(state: Any) -> Any:
    document, tensors = codec.encode(state)
    return codec.decode(through_json(document), tensors)


VALUES = [
    None,
    True,
    0,
    -(2**63),
    2**63,
    -(10**200),
    0.1,
    -0.0,
    math.inf,
    -math.inf,
    5e-324,
    "",
    "ünïcode \ud800 \x00",
    b"",
    b"\x00\xff" * 5000,
    bytearray(b"abc"),
    [],
    [1, [2, (3,)]],
    (),
    (1, "a", None),
    {},
    {"b": {"c": [1.5]}, "a": 2},
    {7: 3, "a": 1, True: 4},
    {1: "int", "1": "str", 1.5: "float", None: "none", (1, "x"): "tuple", b"k": "bytes"},
    {"$": "mine", "a": 1},
    {"items": [], "$": {"$": "tuple"}},
    set(),
    {1, "a", (2, 3)},
    frozenset({b"x"}),
    OrderedDict([("b", 1), ("a", 2)]),
    Counter("aab"),
    Counter({1: 2}),
    defaultdict(list, a=[1]),
    defaultdict(None, {3: 4}),
    1 + 2j,
    complex(math.inf, -0.0),
    range(1, 10, 3),
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.device("cuda", 1),
    torch.Size([2, 3]),
    pathlib.Path("/data/run 1"),
    pathlib.PureWindowsPath("C:\\x"),
    datetime.timedelta(days=-1, microseconds=7),
    datetime.date(2024, 2, 29),
    datetime.datetime(2024, 1, 2, 3, 4, 5, 6),
    datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
    numpy.float32(0.1),
    numpy.float64(0.1),
    numpy.int64(-5),
    numpy.uint64(2**64 - 1),
    numpy.bool_(True),
    numpy.complex64(1 + 2j),
]


# A set's own text differs from process to process.
@pytest.mark.parametrize("value", VALUES, ids=[f"{type(value).__name__}-{at}" for at, value in enumerate(VALUES)])
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    found = round_trip({"here": [value]})["here"][0]

    assert type(found) is type(value)
    assert found == value
    # Equal sets may be in another order.
    if not isinstance(value, (set, frozenset)):
        assert repr(found) == repr(value)


def test_an_integer_of_any_length_comes_back() -> None:
    # Python refuses to read more than 4,300 decimal digits.
    assert round_trip(-(10**5000)) == -(10**5000)


def test_nan_comes_back() -> None:
    assert math.isnan(round_trip(math.nan))
    assert math.isnan(round_trip(torch.tensor(math.nan, dtype=torch.bfloat16)))


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_come_back(dtype: torch.dtype) -> None:
    tensors = [torch.tensor([0.0, 1.0, 3.0]).to(dtype), torch.tensor(1.0).to(dtype), torch.empty(0, 2, dtype=dtype)]
    for found in (round_trip(tensors), codec.decode(through_json(codec.encode_inline(tensors)))):
        for before, after in zip(tensors, found, strict=True):
            assert after.dtype == before.dtype
            assert after.shape == before.shape
            assert after.reshape(-1).view(torch.uint8).tolist() == before.reshape(-1).view(torch.uint8).tolist()


def test_tensors_lie_under_their_path_and_never_collide() -> None:
    state = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, "list": [torch.full((1,), 2.0)]}
    document, tensors = codec.encode(state)

    assert set(tensors) == {"a/b", "a/b~2", "list/0"}
    found = codec.decode(document, tensors)
    assert (found["a/b"].item(), found["a"]["b"].item()) == (1.0, 0.0)


@pytest.mark.parametrize("name", codec.NUMPY)
def test_arrays_come_back(name: str) -> None:
    for array in (numpy.arange(6).astype(name).reshape(2, 3).T, numpy.array(1).astype(name)):
        found = round_trip(array)

        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert (found == array).all()


def test_generator_states_come_back_inline() -> None:
    import random

    state = {"python": random.getstate(), "torch": torch.get_rng_state(), "numpy": numpy.random.get_state()}
    found = codec.decode(through_json(codec.encode_inline(state)))

    assert found["python"] == state["python"]
    assert torch.equal(found["torch"], torch.get_rng_state())
    numpy.random.set_state(found["numpy"])


@pytest.mark.parametrize(
    "value",
    [
        object(),
        print,
        Colour.RED,
        Level.LOW,
        Pair(1, 2),
        {Colour.RED: 1},
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.Generator(),
        numpy.array(["a"]),
        numpy.array([object()]),
        numpy.arange(2, dtype=">i4"),
        numpy.longdouble(1),
        type("Mine", (dict,), {})(a=1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_with_its_place(value: Any) -> None:
    with refuses(ConfigurationError, "['callbacks']['0']", "state_dict"):
        codec.encode({"callbacks": [value]})


def test_a_cycle_and_a_deep_nest_are_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for state in (cycle, deep):
        with pytest.raises(ConfigurationError):
            codec.encode(state)


def test_the_same_object_twice_is_not_a_cycle() -> None:
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


def test_an_unknown_factory_becomes_a_dict() -> None:
    assert type(round_trip(defaultdict(lambda: 3, a=1))) is dict


@pytest.mark.parametrize(
    "document",
    [
        {"$": "object", "module": "os", "name": "system"},
        {"$": ["unhashable"]},
        {"$": None},
        {"$": "tuple"},
        {"$": "tuple", "items": 3},
        {"$": "tensor", "key": "missing"},
        {"$": "scalar", "dtype": "float33", "value": 1},
        {"$": "scalar", "dtype": "uint8", "value": "x"},
        {"$": "float", "value": "1e400"},
        {"$": "int", "value": "zz"},
        {"$": "path", "type": "Popen", "value": "x"},
        {"$": "numpy", "dtype": "object", "value": 1},
        {"$": "defaultdict", "factory": "eval", "items": []},
        {"$": "dict", "items": [[[1], 2]]},
        {"$": "inline", "dtype": "float32", "shape": [1 << 40], "base64": "AAAA"},
        {"$": "bytes", "base64": "***"},
    ],
    ids=str,
)
def test_a_hostile_document_is_refused(document: JSON) -> None:
    with refuses(CheckpointError, "document['x']"):
        codec.decode({"x": document})
