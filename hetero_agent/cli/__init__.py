"""heteroctl: the agent for people at a shell."""
