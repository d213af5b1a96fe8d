"""Makes a tiny Hugging Face model folder that can nearly add: what the quickstart trains by PPO.

    python launch/make_tiny_model.py OUT --data DIR      # DIR holds train.parquet and validation.parquet

The model has the Qwen2 architecture (4 layers, hidden 128) and a tokenizer of single characters. It is warm-started by
some seconds of plain supervised training on questions of the training file ("12+34=" -> "46<eos>"), stopped when it
answers about `--target` of the questions that were held back from that file. The validation file is only measured.

PPO needs such a start: from random weights no sample is ever right, and nothing can be reinforced.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+-*=? abcdefghijklmnopqrstuvwxyz\n.#,:"
MAX_POSITIONS = 512
HELD_BACK = 256  # questions of the training file that decide when to stop
MEASURE_EVERY = 10  # steps

Pair = tuple[str, str]  # question, answer


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; no token is added at either end, as with Qwen2's own tokenizer."""
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, UNK, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Random weights, float32. Heads, layers and vocabulary divide by 2, so that TP 2 and PP 2 fit."""
    vocab_size = (len(tokenizer) + 15) // 16 * 16
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config).to(torch.float32)


def read_pairs(path: Path) -> list[Pair]:
    table = pq.read_table(path, columns=["prompt", "reward_model"])
    prompts, rewards = table["prompt"].to_pylist(), table["reward_model"].to_pylist()
    if any(not isinstance(prompt, str) for prompt in prompts):
        sys.exit(f"{path}: the column prompt must hold plain strings (this tokenizer has no chat template)")
    return [(prompt, str(reward["ground_truth"])) for prompt, reward in zip(prompts, rewards, strict=True)]


def make_batch(tokenizer: PreTrainedTokenizerFast, pairs: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids_bt and labels_bt, int64, padded on the right; only the answer and its end are learned (the rest is -100)."""
    questions = [tokenizer(question).input_ids for question, _ in pairs]
    answers = [[*tokenizer(answer).input_ids, tokenizer.eos_token_id] for _, answer in pairs]
    width = max(len(q) + len(a) for q, a in zip(questions, answers, strict=True))
    ids_bt = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels_bt = torch.full((len(pairs), width), -100)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        end = len(question) + len(answer)
        ids_bt[row, :end] = torch.tensor(question + answer)
        labels_bt[row, len(question) : end] = torch.tensor(answer)
    return ids_bt, labels_bt


@torch.no_grad()
def greedy_accuracy(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[Pair]) -> float:
    """The share of questions answered right by greedy decoding.

    One forward pass does it: greedy decoding gives the answer exactly if, fed the right answer, every position's
    likeliest token is the right one.
    """
    ids_bt, labels_bt = make_batch(tokenizer, pairs)
    guesses_bt = model(input_ids=ids_bt).logits[:, :-1].argmax(-1)
    wanted_bt = labels_bt[:, 1:]
    return float(((guesses_bt == wanted_bt) | (wanted_bt == -100)).all(1).float().mean())


def warm_start(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[Pair], args: argparse.Namespace
) -> tuple[int, float]:
    """Trains in place until `args.target` of the held-back questions are right; returns (steps taken, that share)."""
    shuffler = random.Random(args.seed)
    pairs = shuffler.sample(pairs, len(pairs))
    held_back, learned = pairs[: min(HELD_BACK, len(pairs) // 5)], pairs[min(HELD_BACK, len(pairs) // 5) :]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.1)
    accuracy = 0.0
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / 20)
        batch = shuffler.sample(learned, min(args.batch, len(learned)))
        ids_bt, labels_bt = make_batch(tokenizer, batch)
        loss = model(input_ids=ids_bt, labels=labels_bt).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % MEASURE_EVERY == 0:
            accuracy = greedy_accuracy(model, tokenizer, held_back)
            if args.verbose:
                print(f"  step {step}: loss {loss.item():.3f}, held back {accuracy:.3f}", flush=True)
            if accuracy >= args.target:
                return step, accuracy
    return args.steps, accuracy


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the model folder to make")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and validation.parquet")
    parser.add_argument("--target", type=float, default=0.43, help="share of held-back questions to stop at")
    parser.add_argument("--steps", type=int, default=600, help="supervised steps at most (0: random weights)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print the learning curve")
    args = parser.parse_args(arguments)

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # the model is too small for more, and results then do not depend on the core count
    torch.manual_seed(args.seed)
    started = time.monotonic()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    steps, held_back = warm_start(model, tokenizer, read_pairs(args.data / "train.parquet"), args)
    seconds = time.monotonic() - started
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(args.out, safe_serialization=True)
    tokenizer.save_pretrained(args.out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    validation = greedy_accuracy(model, tokenizer, read_pairs(args.data / "validation.parquet"))
    print(f"tiny model: {parameters / 1e6:.2f} M parameters, {steps} supervised steps in {seconds:.0f} s;", end=" ")
    print(f"greedy accuracy {held_back:.1%} on questions held back, {validation:.1%} on validation")


if __name__ == "__main__":
    main()
