"""Calls on a stack of their own."""

import sys
import threading
from typing import Any

import pytest

from daceml_train.runtime import deep_calls
from daceml_train.runtime.deep_calls import call_deeply


def by_native_code(depth: int) -> int:
    """Calls itself by way of `map`, which takes some of the native stack each time."""
    return next(map(by_native_code, [depth - 1])) + 1 if depth else 0


@pytest.mark.compiled
def test_calls_are_as_deep_as_they_need_and_the_limit_is_restored() -> None:
    limit = sys.getrecursionlimit()
    assert call_deeply(lambda: by_native_code(60_000)) == 60_000
    assert sys.getrecursionlimit() == limit
    with pytest.raises(RecursionError):
        by_native_code(60_000)


@pytest.mark.compiled
def test_a_recursion_without_end_is_an_error() -> None:
    with pytest.raises(RecursionError):
        call_deeply(lambda: by_native_code(10**9))
    assert call_deeply(lambda: by_native_code(60_000)) == 60_000, "works after the error"


@pytest.mark.compiled
def test_errors_and_the_thread_are_those_of_the_caller() -> None:
    local = threading.local()
    local.value = 3
    assert call_deeply(lambda: (local.value, threading.current_thread())) == (3, threading.current_thread())
    with pytest.raises(ZeroDivisionError):
        call_deeply(lambda: 1 / 0)
    assert call_deeply(lambda: call_deeply(lambda: by_native_code(10_000))) == 10_000
    assert call_deeply(lambda: None) is None


@pytest.mark.compiled
def test_several_threads_at_once() -> None:
    found: list[int] = []
    limit = sys.getrecursionlimit()
    threads = [
        threading.Thread(target=lambda n=n: found.append(call_deeply(lambda: by_native_code(n))))
        for n in (20_000, 30_000, 40_000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [20_000, 30_000, 40_000] and sys.getrecursionlimit() == limit


@pytest.mark.compiled
def test_without_a_stack_the_limit_stands(monkeypatch: Any) -> None:
    monkeypatch.setattr(deep_calls, "BYTES_PER_CALL", 1 << 42)
    limit = sys.getrecursionlimit()
    assert call_deeply(sys.getrecursionlimit) == limit
