"""What a reward model reads: the actor's tokens where it has the actor's tokenizer, else the text encoded again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megappo.data import batch
from megappo.data.loss_mask import was_cut
from megappo.data.sequences import joined

COLUMNS = ("prompt_ids", "response_ids", "prompt_text", "messages", "finish_reason")
"""The columns of a batch that a reading needs."""


@lru_cache(maxsize=4)
def make_reader(actor_folder: str, reward_folder: str) -> Reader:
    """The reader of a reward model whose tokenizer is in ``reward_folder``, for responses of the actor's."""
    from transformers import AutoTokenizer

    actor = AutoTokenizer.from_pretrained(actor_folder)
    return Reader(actor, actor if actor_folder == reward_folder else AutoTokenizer.from_pretrained(reward_folder))


@dataclass(frozen=True)
class Reader:
    """Turns rows into the sequences that a reward model scores.

    Attributes:
        actor: the tokenizer of the rows' token ids, from transformers.
        reward: the reward model's.
    """

    actor: Any
    reward: Any

    def sequences(self, rows: pa.Table) -> list[npt.NDArray]:
        """Token ids of prompt and response of each row, int32, as the reward model knows them.

        Where the tokenizers differ, the sequence is what ``megappo reward-train`` makes of the same text: chat messages
        by the reward model's own template, up to where the assistant's turn begins, or the plain prompt; the decoded
        response; and, unless the response was cut, the reward model's end-of-text token, at which it then scores.

        Args:
            rows: ``prompt_ids`` and ``response_ids``; where the tokenizers differ also ``prompt_text``, ``messages``
                (JSON; null of a plain prompt) and ``finish_reason``.
        """
        if same_tokenizer(self.actor, self.reward):
            return joined(rows)
        answers = self.actor.batch_decode(batch.split_rows(rows, "response_ids"), skip_special_tokens=True)
        prompts, chats = rows.column("prompt_text").to_pylist(), rows.column("messages").to_pylist()
        return [
            self._sequence(prompt, json.loads(chat) if chat else None, answer, ended=not cut)
            for prompt, chat, answer, cut in zip(prompts, chats, answers, was_cut(rows), strict=True)
        ]

    def _sequence(
        self, prompt: str, messages: list[dict[str, Any]] | None, answer: str, *, ended: bool
    ) -> npt.NDArray[np.int32]:
        if messages is not None:
            prompt = self.reward.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        # A chat template writes its special tokens itself, so that the tokenizer must not add them again.
        tokens = self.reward(prompt, add_special_tokens=messages is None)["input_ids"]
        tokens += self.reward(answer, add_special_tokens=False)["input_ids"]
        end = self.reward.eos_token_id
        return np.array([*tokens, *([end] if ended and end is not None else [])], np.int32)


def same_tokenizer(one: Any, other: Any) -> bool:
    """Whether two tokenizers of transformers write the same text and messages as the same tokens."""
    if one is other:
        return True
    if one.chat_template != other.chat_template or one.eos_token_id != other.eos_token_id:
        return False
    if one.is_fast and other.is_fast:
        return one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    return type(one) is type(other) and one.get_vocab() == other.get_vocab()
