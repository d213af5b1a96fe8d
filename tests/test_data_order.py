from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.data.order import PromptOrder

orders = st.builds(PromptOrder, num_prompts=st.integers(1, 40), seed=st.integers(0, 2**32), shuffle=st.booleans())
counts = st.integers(1, 100)


@settings(max_examples=100, deadline=None)
@given(orders, st.lists(counts, min_size=1, max_size=20))
def test_every_epoch_holds_each_prompt_exactly_once(order: PromptOrder, cuts: list[int]) -> None:
    """However the stream is cut into takes."""
    parts, position = [], 0
    for count in [*cuts, 3 * order.num_prompts]:
        parts.append(order.take(position, count))
        position += count
    stream = np.concatenate(parts)
    assert stream.dtype == np.int64
    assert len(stream) == position
    for epoch in range(3):
        part = stream[epoch * order.num_prompts : (epoch + 1) * order.num_prompts]
        assert sorted(part) == list(range(order.num_prompts))


@settings(max_examples=50, deadline=None)
@given(orders, st.integers(0, 50_000), counts)
def test_what_comes_depends_on_nothing_but_the_position(order: PromptOrder, start: int, count: int) -> None:
    fresh = PromptOrder(order.num_prompts, order.seed, order.shuffle)
    for earlier in (0, start // 2):
        order.take(earlier, count)
    np.testing.assert_array_equal(order.take(start, count), fresh.take(start, count))
    assert order.epoch(start) == start // order.num_prompts


def test_without_shuffling_the_order_is_that_of_the_files_over_and_over() -> None:
    order = PromptOrder(num_prompts=3, seed=1, shuffle=False)
    assert order.take(0, 4).tolist() == [0, 1, 2, 0]
    assert order.take(4, 4).tolist() == [1, 2, 0, 1]
    assert [order.epoch(4 * i) for i in range(4)] == [0, 1, 2, 4]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order = PromptOrder(num_prompts=50, seed=1)
    assert order.take(0, 50).tolist() != order.take(50, 50).tolist()
    assert order.take(0, 50).tolist() != PromptOrder(50, seed=2).take(0, 50).tolist()


def test_a_far_epoch_is_quick_and_a_caller_cannot_spoil_the_next() -> None:
    order = PromptOrder(num_prompts=10, seed=1)
    first = order.take(10**10, 10)
    expected = first.copy()
    first[:] = 0
    np.testing.assert_array_equal(order.take(10**10, 10), expected)


@pytest.mark.parametrize("bad", [{"num_prompts": 0}, {"seed": -1}])
def test_impossible_sizes_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        PromptOrder(**{"num_prompts": 4, "seed": 0, **bad})
    for start, count in ((-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"start is {start}, count is {count}"):
            PromptOrder(4, 0).take(start, count)
