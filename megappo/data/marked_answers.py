r"""How answers are marked in data sets, and therefore in responses: `#### 72` in GSM8K, `\boxed{72}` in MATH."""

from __future__ import annotations

import re

NUMBER = r"[-+]?\$?[-+]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
AFTER_HASHES = re.compile(rf"####\s*({NUMBER})(?![0-9]|\s*/\s*[0-9])")  # not the numerator of "#### 1/2"
BOXED = re.compile(r"\\(?:boxed|fbox)\s*")


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` (or `\fbox{...}`, or `\boxed 5`) holds, braces nested; None if there is none."""
    boxes = list(BOXED.finditer(text))
    if not boxes:
        return None
    rest = text[boxes[-1].end() :]
    if not rest.startswith("{"):
        word = re.match(r"[^\s$]+", rest)
        return word.group() if word else None
    depth = 0
    for token in re.finditer(r"\\[{}]|[{}]", rest):  # an escaped brace is text
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return rest[1 : token.start()]
    return None
