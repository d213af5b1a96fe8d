"""What keeps a job from being written."""

from __future__ import annotations


class LaunchError(ValueError):
    """A job that could not run. Attribute ``problems``: all of them, one line each, with its fix."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
