"""Benchmarks: one command each, which prints a small table and writes JSON. Every figure is a ratio from one run."""
