"""Files that ``megappo plan`` writes."""

from __future__ import annotations

from pathlib import Path


class OptionError(ValueError):
    """Options that cannot be had; ``problems`` names each, with its fix."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def write_output(option: str, path: Path, text: str) -> None:
    """Write a file that an option names; its folder is made.

    Raises:
        OptionError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{option}: {path} cannot be written ({error.strerror}): choose another") from None
