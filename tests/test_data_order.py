from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.data.order import PromptOrder

orders = st.builds(
    PromptOrder,
    num_prompts=st.integers(1, 40),
    per_step=st.integers(1, 100),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(orders)
def test_every_epoch_holds_each_prompt_exactly_once(order: PromptOrder) -> None:
    steps = 3 * order.num_prompts // order.per_step + 1
    stream = np.concatenate([order.step(i) for i in range(steps)])
    assert stream.dtype == np.int64
    assert len(stream) == steps * order.per_step
    for epoch in range(3):
        part = stream[epoch * order.num_prompts : (epoch + 1) * order.num_prompts]
        assert sorted(part) == list(range(order.num_prompts))


@settings(max_examples=50, deadline=None)
@given(orders, st.integers(0, 500))
def test_a_step_depends_on_nothing_but_its_index(order: PromptOrder, step: int) -> None:
    fresh = PromptOrder(order.num_prompts, order.per_step, order.seed, order.shuffle)
    for earlier in range(min(step, 3)):
        order.step(earlier)
    np.testing.assert_array_equal(order.step(step), fresh.step(step))
    assert order.epoch(step) == step * order.per_step // order.num_prompts


def test_without_shuffling_the_order_is_that_of_the_files_over_and_over() -> None:
    order = PromptOrder(num_prompts=3, per_step=4, seed=1, shuffle=False)
    assert order.step(0).tolist() == [0, 1, 2, 0]
    assert order.step(1).tolist() == [1, 2, 0, 1]
    assert [order.epoch(i) for i in range(4)] == [0, 1, 2, 4]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order = PromptOrder(num_prompts=50, per_step=50, seed=1)
    assert order.step(0).tolist() != order.step(1).tolist()
    assert order.step(0).tolist() != PromptOrder(50, 50, seed=2).step(0).tolist()


def test_a_step_in_a_far_epoch_is_quick_and_a_caller_cannot_spoil_the_next() -> None:
    order = PromptOrder(num_prompts=10, per_step=10, seed=1)
    first = order.step(10**9)
    expected = first.copy()
    first[:] = 0
    np.testing.assert_array_equal(order.step(10**9), expected)


@pytest.mark.parametrize("bad", [{"num_prompts": 0}, {"per_step": 0}, {"seed": -1}])
def test_impossible_sizes_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        PromptOrder(**{"num_prompts": 4, "per_step": 2, "seed": 0, **bad})
    with pytest.raises(ValueError, match="step_index"):
        PromptOrder(4, 2, 0).step(-1)
