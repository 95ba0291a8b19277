"""The profiles that the agent ships; the schema is in docs/profiles.md."""
