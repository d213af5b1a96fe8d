"""What is added to a response's score before advantages are taken."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(lengths_b: Tensor, *, longest: int, buffer: int) -> Tensor:
    """0 up to `longest - buffer` tokens, from there falling to -1 at `longest`: DAPO's soft overlong punishment.

    Yu et al. (arXiv:2503.14476), equation 13: a response that was cut at the limit is not simply wrong, so that short
    of the limit the punishment grows token by token instead of striking all at once.

    Args:
        lengths_b: [b] integer, tokens of each response.
        longest: tokens that a response may have (L_max).
        buffer: tokens before that over which the penalty grows (L_cache), 1 <= buffer <= longest.

    Returns:
        [b] float32 in [-1, 0].

    Raises:
        ValueError: a buffer out of its range.
    """
    if not 1 <= buffer <= longest:
        raise ValueError(f"buffer is {buffer}; it must lie in [1, {longest}], longest being {longest}")
    return ((longest - buffer - lengths_b).float() / buffer).clamp(-1.0, 0.0)
