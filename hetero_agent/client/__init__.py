"""The library that speaks to the agent: for heteroctl, the simulator, bridges, other programs."""

from hetero_agent.client.client import Client
from hetero_agent.client.errors import CallTimeout, HeteroError, NoAgent, NoBus, Unreachable
from hetero_agent.client.manifest import Manifest

__all__ = ["CallTimeout", "Client", "HeteroError", "Manifest", "NoAgent", "NoBus", "Unreachable"]
