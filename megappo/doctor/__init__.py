"""What of a machine, or of the nodes of an allocation, will hurt a run: seen before it starts, with the fix."""
