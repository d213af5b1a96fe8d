"""``megappo convert``: Hugging Face folders and Megatron checkpoints, each made from the other, in bounded memory."""
