"""The audit trail in the journal and the daemon's own log."""
