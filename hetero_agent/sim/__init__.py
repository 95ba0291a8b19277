"""Virtual devices: a provider like any vendor's, in a process of its own."""
