"""Ray: pools of devices, worker groups, and the batch that stays in the object store between them."""
