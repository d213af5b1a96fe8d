"""The parallel mesh as pure arithmetic: standard library only."""
