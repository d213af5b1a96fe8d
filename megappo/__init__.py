"""megappo: PPO for language models on Megatron-core, vLLM and Ray."""

__version__ = "0.1.0"
