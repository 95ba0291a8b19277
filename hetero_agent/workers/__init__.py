"""Worker processes that can be given up: what the agent starts, and what runs in them."""
