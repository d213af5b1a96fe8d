"""Published data sets, from the files as they are published to the parquet columns that training reads."""

INSTRUCTIONS = {
    "gsm8k": 'Let\'s think step by step and output the final answer after "####".',
    "math": "Let's think step by step and output the final answer within \\boxed{}.",
    "hellaswag": 'Which ending fits best? Finish with its letter alone, as in "Answer: A".',
    "hh-rlhf": "",
}
"""The data sets, each with the text that follows every question by default; in hh-rlhf it is a system message.

Those of gsm8k and math are verl's. Nothing is imported here, so that the command line can name them at no cost."""
