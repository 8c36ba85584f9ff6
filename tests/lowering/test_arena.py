"""The arena's plan: live arrays never overlap, dead ones are reused, everything is aligned."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from daceml_train.lowering.arena import ALIGNMENT, Lifetime, lower_bound, plan_arena
from tests.timing import thread_seconds

lifetimes = st.lists(
    st.builds(
        lambda size, first, length: Lifetime(size, first, first + length),
        st.integers(0, 1000),
        st.integers(0, 30),
        st.integers(0, 10),
    ),
    max_size=40,
)


@given(lifetimes)
@settings(max_examples=300, deadline=None)
def test_live_arrays_do_not_overlap(lives: list[Lifetime]) -> None:
    offsets, total = plan_arena(lives)
    for i, (a, x) in enumerate(zip(lives, offsets, strict=True)):
        assert x % ALIGNMENT == 0
        assert x + a.bytes <= total or a.bytes == 0
        for b, y in list(zip(lives, offsets, strict=True))[:i]:
            together = a.first <= b.last and b.first <= a.last
            if together and a.bytes and b.bytes:
                assert x + a.bytes <= y or y + b.bytes <= x


@given(lifetimes)
@settings(max_examples=100, deadline=None)
def test_no_plan_is_below_the_bytes_that_live_at_once(lives: list[Lifetime]) -> None:
    bound = lower_bound(lives)
    most = max((sum(x.bytes for x in lives if x.first <= t <= x.last) for t in range(41)), default=0)
    assert most <= bound <= plan_arena(lives)[1]


def test_large_arrays_come_first() -> None:
    """By time alone, the long-lived small array would stand in the way of the large ones: 1024 + 64 + 2048."""
    lives = [Lifetime(1024, 0, 1), Lifetime(64, 1, 9), Lifetime(2048, 2, 3), Lifetime(2048, 4, 5)]
    assert plan_arena(lives)[1] == lower_bound(lives) == 2048 + 64


def test_many_arrays_are_placed() -> None:
    lives = [Lifetime(64 + i % 7, i, i + 3) for i in range(5000)]
    offsets, total = plan_arena(lives)
    assert total <= 2 * lower_bound(lives)
    for i in range(4997):
        spans = sorted((offsets[k], offsets[k] + lives[k].bytes) for k in range(i, i + 4))
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_a_chain_takes_two_buffers() -> None:
    offsets, total = plan_arena([Lifetime(1024, i, i + 1) for i in range(100)])
    assert total == 2 * 1024
    assert set(offsets) == {0, 1024}


def test_neighbors_that_are_free_merge() -> None:
    offsets, total = plan_arena([Lifetime(64, 0, 0), Lifetime(64, 0, 0), Lifetime(128, 1, 1)])
    assert total == 128 and offsets[2] == 0


def test_planning_is_near_linear() -> None:
    def seconds(count: int) -> float:
        lives = [Lifetime(64 * (i % 17 + 1), i, i + 5) for i in range(count)]
        return thread_seconds(lambda: plan_arena(lives))

    seconds(1000)
    assert seconds(8000) < 24 * seconds(1000)
