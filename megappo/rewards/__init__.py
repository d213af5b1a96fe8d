"""Rule-based rewards, and running anybody's reward functions safely."""
