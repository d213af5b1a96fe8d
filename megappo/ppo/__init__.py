"""PPO as plain functions on tensors: rewards, advantages, losses, KL, batching, schedules. No Ray, no Megatron."""
