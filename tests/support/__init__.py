"""What several tests need: waiting for a condition, a private bus, the agent as a process."""
