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
from megappo.data.sequences import joined

COLUMNS = ("prompt_ids", "response_ids", "prompt_text", "messages")
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

        Where the tokenizers differ, the response is decoded. After chat messages it becomes the assistant's turn in the
        reward model's own chat template; after a plain prompt it follows the text, and an end-of-text token stays one.

        Args:
            rows: ``prompt_ids``, ``response_ids``, ``prompt_text`` and ``messages`` (JSON; null of a plain prompt).
        """
        if same_tokenizer(self.actor, self.reward):
            return joined(rows)
        responses = [ids.tolist() for ids in batch.split_rows(rows, "response_ids")]
        answers = self.actor.batch_decode(responses, skip_special_tokens=True)
        prompts, chats = rows.column("prompt_text").to_pylist(), rows.column("messages").to_pylist()
        return [
            self._chat(json.loads(chat), answer) if chat else self._plain(prompt, answer, ids)
            for prompt, chat, answer, ids in zip(prompts, chats, answers, responses, strict=True)
        ]

    def _chat(self, messages: list[dict[str, Any]], answer: str) -> npt.NDArray:
        turns = [*messages, {"role": "assistant", "content": answer}]
        text = self.reward.apply_chat_template(turns, tokenize=False)
        # The template writes its special tokens itself.
        return np.array(self.reward(text, add_special_tokens=False)["input_ids"], np.int32)

    def _plain(self, prompt: str, answer: str, response: list[int]) -> npt.NDArray:
        ids = self.reward(prompt + answer)["input_ids"]
        end = self.reward.eos_token_id
        ended = response[-1:] == [self.actor.eos_token_id]
        return np.array([*ids, *([end] if ended and end is not None and ids[-1:] != [end] else [])], np.int32)


def same_tokenizer(one: Any, other: Any) -> bool:
    """Whether two tokenizers of transformers write the same text and messages as the same tokens."""
    if one is other:
        return True
    if one.chat_template != other.chat_template or one.eos_token_id != other.eos_token_id:
        return False
    if one.is_fast and other.is_fast:
        return one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    return type(one) is type(other) and one.get_vocab() == other.get_vocab()
