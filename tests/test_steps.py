"""What is due after a step, and when a loop takes no more."""

from __future__ import annotations

import pytest

from megappo.steps import NoProgress, is_due, require_progress, take_steps
from megappo.stop_request import StopRequest


class Loop:
    """Saves every so many steps; somebody asks to stop during step ``asked_in``."""

    def __init__(self, done: int, every: int, stop: StopRequest, asked_in: int) -> None:
        self.step, self.every, self.stop, self.asked_in = done, every, stop, asked_in

    def train_step(self) -> bool:
        self.step += 1
        if self.step == self.asked_in:
            self.stop.ask()
        return self.step % self.every == 0


@pytest.mark.parametrize(
    ("done", "every", "asked_in", "ended"),
    [
        (0, 1, 0, (10, True)),
        (10, 1, 0, (10, True)),
        (0, 1, 4, (4, False)),
        (0, 3, 4, (6, False)),  # with a checkpoint
        (2, 20, 4, (10, True)),
        (0, 1, 10, (10, True)),
    ],
)
def test_a_loop_ends_with_its_steps_or_at_the_first_checkpoint_after_a_signal(
    done: int, every: int, asked_in: int, ended: tuple[int, bool]
) -> None:
    stop = StopRequest()
    loop = Loop(done, every, stop, asked_in)
    finished = take_steps(loop, 10, stop)
    assert (loop.step, finished) == ended


def test_a_stop_that_was_asked_for_before_the_first_step_is_no_progress() -> None:
    stop = StopRequest()
    stop.ask()
    loop = Loop(3, 1, stop, 0)
    assert not take_steps(loop, 10, stop)
    with pytest.raises(NoProgress, match="before a single step was done"):
        require_progress((loop.step, True), (3, True))
    require_progress((loop.step, True), (2, True))
    require_progress((loop.step, True), (3, False))  # the validation that was still to come


def test_what_is_due() -> None:
    assert [step for step in range(1, 11) if is_due(step, 4, 10)] == [4, 8, 10]
    assert [step for step in range(1, 11) if is_due(step, 0, 10)] == [10]
    assert [step for step in range(1, 11) if is_due(step, 5, 10)] == [5, 10]
