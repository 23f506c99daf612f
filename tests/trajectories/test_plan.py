"""The order of tasks: a pure function in which every task comes once an epoch."""

from hypothesis import given
from hypothesis import strategies as st

from activities.rollouts.plan import positions


@given(st.integers(1, 30), st.integers(0, 10), st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_every_task_comes_once_an_epoch_whatever_the_batches(count: int, seed: int, sizes: list[int]) -> None:
    taken: list[int] = []
    for size in sizes:
        taken += positions(count, seed, len(taken), size)
    for start in range(0, len(taken) - count + 1, count):
        assert sorted(taken[start : start + count]) == list(range(count))


@given(st.integers(1, 30), st.integers(0, 10), st.integers(0, 100), st.integers(1, 12))
def test_planning_again_gives_the_same(count: int, seed: int, cursor: int, groups: int) -> None:
    assert positions(count, seed, cursor, groups) == positions(count, seed, cursor, groups)


def test_epochs_are_ordered_differently() -> None:
    assert positions(20, 0, 0, 20) != positions(20, 0, 20, 20)
