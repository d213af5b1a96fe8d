"""HH-RLHF (Bai et al., "Training a Helpful and Harmless Assistant with RLHF", 2022): dialogues, chosen and rejected.

Each row of Anthropic/hh-rlhf has two whole dialogues that part in the assistant's last turn. Out of them come three
sets of files: prompts for PPO (all up to that turn), pairs for a reward model, and supervised text (the chosen side).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from megappo.data.published.dataset import MESSAGES, ORIGIN, Converted, Dataset, Unusable, prompt_schema, text

SOURCE = "Anthropic/hh-rlhf"
TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}
EXTRA_INFO = pa.struct(ORIGIN)


class Dialogue(NamedTuple):
    prompt: list[dict[str, str]]  # chat messages; the last is the user's
    response: str


def parse_dialogue(text: str) -> Dialogue:
    r"""Split a dialogue of "\n\nHuman:" and "\n\nAssistant:" turns before the last one, the assistant's.

    Turns of one role in a row become one message, as chat templates want it, with a blank line between them.

    Raises:
        Unusable: anything but turns that start with a human one, end with an assistant's, and none of them empty.
    """
    before, *parts = TURN.split(text)
    if before.strip() or not parts:
        raise Unusable('does not start with a "Human:" turn')
    messages: list[dict[str, str]] = []
    for role, content in zip(parts[::2], parts[1::2], strict=True):
        if messages and messages[-1]["role"] == ROLES[role]:
            messages[-1]["content"] = f"{messages[-1]['content']}\n\n{content.strip()}".strip()
        else:
            messages.append({"role": ROLES[role], "content": content.strip()})
    if messages[0]["role"] != "user":
        raise Unusable('does not start with a "Human:" turn')
    if messages[-1]["role"] != "assistant":
        raise Unusable('does not end with an "Assistant:" turn')
    if not messages[-1]["content"]:
        raise Unusable("has an empty response")
    if not all(message["content"] for message in messages):
        raise Unusable("has an empty turn")
    return Dialogue(messages[:-1], messages[-1]["content"])


def _convert(row: Mapping[str, Any], instruction: str) -> Converted:
    system = [{"role": "system", "content": instruction}] if instruction else []
    chosen = _parse(row, "chosen")
    prompt = [*system, *chosen.prompt]
    rows: dict[str, dict[str, Any]] = {
        "prompts": {
            "data_source": SOURCE,
            "prompt": prompt,
            "ability": "alignment",
            "reward_model": {"style": "model", "ground_truth": chosen.response},
            "extra_info": {"answer": chosen.response, "question": chosen.prompt[-1]["content"]},
        },
        "sft": {"data_source": SOURCE, "prompt": prompt, "response": chosen.response, "extra_info": {}},
    }
    try:
        rejected = _parse(row, "rejected")
        if chosen == rejected:
            raise Unusable("chosen and rejected are equal")
        if chosen.prompt != rejected.prompt:
            raise Unusable("chosen and rejected do not share the prompt")
    except Unusable as reason:
        return Converted(rows, (f"left out of the pairs: {reason}",))
    pair = {"chosen": chosen.response, "rejected": rejected.response}
    return Converted({**rows, "pairs": {"data_source": SOURCE, "prompt": prompt, **pair, "extra_info": {}}})


def _parse(row: Mapping[str, Any], column: str) -> Dialogue:
    dialogue = text(row, column)
    try:
        return parse_dialogue(dialogue)
    except Unusable as reason:
        raise Unusable(f"{column} {reason}") from None


def _schema(*columns: str) -> pa.Schema:
    fields = [("data_source", pa.string()), ("prompt", MESSAGES), *((column, pa.string()) for column in columns)]
    return pa.schema([*fields, ("extra_info", EXTRA_INFO)])


DATASET = Dataset(
    name="hh-rlhf",
    required=("chosen", "rejected"),
    schemas={"prompts": prompt_schema(), "pairs": _schema("chosen", "rejected"), "sft": _schema("response")},
    convert=_convert,
    skip=("red-team-attempts", "red_team_attempts"),  # dialogues with ratings, not pairs
)
