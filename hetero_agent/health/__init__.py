"""How devices are: rounds of probes, what the kernel says, alerts."""
