"""Moving weights between layouts: boxes, the plan, transports and proof."""
