"""What every rank process of the tests has imported before it is forked."""

import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402

torch.set_num_threads(1)

import torch._dynamo  # noqa: E402 (torch.optim imports it lazily, seconds per rank)
import transformers  # noqa: E402, F401

import megappo.workers.megatron_role  # noqa: E402, F401
