"""Seconds of launches by a device's figures: memory, L2, arithmetic, launches."""

import math
from dataclasses import replace

import pytest

from daceml_train.analysis.device_model import DEVICES
from daceml_train.lowering.device_time import Operation, converted_bytes, multiplies_in, timed
from daceml_train.tensor import DType

H100 = DEVICES["h100"]
MB = 1e6


def operation(reads: dict[str, float], writes: dict[str, float], **options: float) -> Operation:
    touched = (tuple(arrays.items()) for arrays in (reads, writes))
    return Operation("f", "kernel", *touched, **options)  # type: ignore[arg-type]


def test_what_was_just_written_is_read_from_the_l2() -> None:
    small, large = 20 * MB, 200 * MB
    first, second = timed(H100, [operation({}, {"a": small}), operation({"a": small}, {"b": MB})])
    assert (first.bound, second.bound) == ("L2", "L2")
    chain = [operation({}, {"a": large}), operation({"a": large}, {"b": large})]
    assert [t.bound for t in timed(H100, chain)] == ["memory", "memory"]
    assert timed(H100, chain)[1].seconds == pytest.approx(2 * large / 3.35e12 / 0.9)


def test_the_least_recently_used_array_leaves() -> None:
    """What was changed is written to memory then, and read again from there."""
    between = [operation({}, {f"x{i}": 12 * MB}) for i in range(4)]
    later = operation({f"x{i}": 12 * MB for i in range(4)}, {})  # until then they need their places
    *_, again, _ = timed(H100, [operation({}, {"a": 12 * MB}), *between, operation({"a": 12 * MB}, {}), later])
    assert again.bound == "memory"
    *_, last = timed(H100, [operation({}, {"a": 12 * MB}), between[0], operation({"a": 12 * MB}, {})])
    assert last.bound == "L2"


def test_bounds() -> None:
    (launch,) = timed(H100, [operation({"a": 100.0}, {})])
    assert (launch.bound, launch.seconds) == ("launch", 2e-6)
    (several,) = timed(H100, [operation({"a": 100.0}, {}, launches=3)])
    assert several.seconds == pytest.approx(6e-6)
    (matmul,) = timed(H100, [operation({"a": MB}, {}, flops=1e12, results=1e7, dtype="bfloat16")])  # type: ignore[arg-type]
    assert matmul.bound == "arithmetic" and matmul.busy == pytest.approx(1e12 / 989.4e12 / 0.75)
    assert matmul.busy < matmul.seconds < 2e-3
    big = operation({"a": 100 * MB}, {})
    (full,), (few,) = timed(H100, [big]), timed(H100, [replace(big, threads=132 * 64)])
    assert few.seconds == pytest.approx(8 * full.seconds) and few.busy == pytest.approx(full.seconds)
    assert math.isinf(big.threads)


def test_the_type_of_a_multiplication() -> None:
    assert multiplies_in("aten::convolution", DType.float32, 1.0, tf32=False) == "tf32"
    assert multiplies_in("matmul", DType.float32, 1.0, tf32=False) == "float32"
    assert multiplies_in("matmul", DType.float32, 1.0, tf32=True) == "tf32"
    assert multiplies_in("mm", DType.bfloat16, 1.0, tf32=True) == "bfloat16"
    assert multiplies_in("add", DType.float32, 1.0, tf32=True) == ""


def test_conversions_of_a_convolution() -> None:
    rows = ([2, 8, 4, 4], [128, 16, 4, 1], 4)
    last = ([2, 8, 4, 4], [128, 1, 32, 8], 4)
    weight = ([16, 8, 1, 1], [8, 1, 1, 1], 4)  # either order is the same
    assert converted_bytes([last, weight]) == 0
    assert converted_bytes([rows, weight]) == 2 * 4 * 256
    assert converted_bytes([last, ([16, 8, 3, 3], [72, 9, 3, 1], 4)]) == 2 * 4 * 16 * 72
