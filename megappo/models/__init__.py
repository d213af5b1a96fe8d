"""What a model family is: its shape, its parameter names everywhere, and how Megatron builds it."""
