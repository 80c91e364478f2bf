"""Which units keep something between microbatches: the most bytes that a limit holds."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdp_passes.sharding.unit_choice import choose_units

EXACT_LIMIT = 2 * 16384 - 1  # up to it a byte is a step
exhaustive = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def named(sizes: list[int]) -> dict[str, int]:
    return {f"unit {number}": size for number, size in enumerate(sizes)}


def best_sum(sizes: list[int], limit: int) -> int:
    """By trying all."""
    subsets = itertools.chain.from_iterable(itertools.combinations(sizes, n) for n in range(len(sizes) + 1))
    return max(total for total in map(sum, subsets) if total <= limit)


def chosen_sum(sizes: list[int], limit: int) -> int:
    chosen = choose_units(named(sizes), limit)
    assert chosen <= named(sizes).keys()
    return sum(named(sizes)[unit] for unit in chosen)


@exhaustive
@given(st.lists(st.integers(1, 8000), max_size=10), st.integers(0, EXACT_LIMIT))
@example([3, 5, 7], 0)
@example([EXACT_LIMIT, EXACT_LIMIT + 1], EXACT_LIMIT)
def test_the_largest_sum_within_the_limit_is_found(sizes: list[int], limit: int) -> None:
    assert chosen_sum(sizes, limit) == best_sum(sizes, limit)


_LARGE_SIZES = st.lists(st.integers(1, 10**12), min_size=1, max_size=10)
_LARGE_LIMITS = st.integers(10**10, 2 * 10**12)


@exhaustive
@given(_LARGE_SIZES, _LARGE_LIMITS)
@example([84999, 84999], 169997)
def test_the_limit_holds_for_large_sizes(sizes: list[int], limit: int) -> None:
    assert chosen_sum(sizes, limit) <= limit


@exhaustive
@given(_LARGE_SIZES, _LARGE_LIMITS)
@example([81924, 81925], 81924 + 81925)
def test_the_sum_of_large_sizes_is_the_largest_but_for_rounding(sizes: list[int], limit: int) -> None:
    """It is no smaller than the largest sum for a limit that is smaller by one step a unit."""
    assert chosen_sum(sizes, limit) >= best_sum(sizes, limit - len(sizes) * (limit >> 20))


@exhaustive
@given(st.lists(st.integers(1, 10**12), max_size=10), st.integers(0, 10**6))
@example([81924, 81925], 0)
def test_where_all_fit_all_wait(sizes: list[int], spare: int) -> None:
    assert choose_units(named(sizes), sum(sizes) + spare) == named(sizes).keys()


@pytest.mark.parametrize(
    "sizes, limit, chosen",
    [
        ({}, 10, set()),
        ({"a": 5, "b": 7}, 0, set()),
        ({"a": 11, "b": 3}, 10, {"b"}),
        ({"a": 11}, 10, set()),
        ({"a": 6, "b": 5, "c": 5}, 10, {"b", "c"}),  # not the largest unit first
        ({"a": 5, "b": 5, "c": 5}, 10, {"a", "b"}),  # of equal ones the first
        ({"a": 4, "b": 6, "c": 10}, 10, {"a", "b"}),
        ({"a": 3 << 40, "b": 1 << 40}, 3 << 40, {"a"}),
    ],
)
def test_examples(sizes: dict[str, int], limit: int, chosen: set[str]) -> None:
    assert choose_units(sizes, limit) == chosen


def test_units_that_are_larger_than_the_limit_cost_nothing() -> None:
    """The sums are bits of one number, which need not reach beyond the limit."""
    tracemalloc.start()
    assert choose_units({"a": 1 << 30, "b": 1 << 29}, 0) == set()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


@exhaustive
@given(st.lists(st.integers(1, 50), max_size=8), st.integers(0, 200), st.randoms())
def test_the_choice_depends_on_nothing_but_its_input(sizes: list[int], limit: int, random: object) -> None:
    """Every rank chooses for itself. In another order of the units other ones may be chosen, of the same sum."""
    assert choose_units(named(sizes), limit) == choose_units(named(sizes), limit)
    shuffled = list(sizes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert chosen_sum(shuffled, limit) == chosen_sum(sizes, limit)
