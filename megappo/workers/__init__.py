"""What runs inside one process: Megatron roles, the rollout engine, reward functions."""
