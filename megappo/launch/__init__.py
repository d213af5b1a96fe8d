"""Jobs for schedulers, written from a configuration: standard library and PyYAML only, for login nodes and laptops."""
