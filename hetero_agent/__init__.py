"""hetero-agent: the one authority on a node for its accelerators."""

__version__ = "0.1.0"
