"""State and decisions: pure, synchronous, stdlib only, no clock and no I/O."""
