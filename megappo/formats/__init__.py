"""Files of tensors, safetensors and torch_dist: any block read and written in its place, without importing torch."""
