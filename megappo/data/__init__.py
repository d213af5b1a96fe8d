"""Prompts in and batches through: parquet files, the order of prompts, and the Arrow table of samples."""
