"""The kernel's devices as records: uevents and sysfs in, `Observed` events out; read-only."""
