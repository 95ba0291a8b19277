"""What is written down: the lease ledger with its audit outbox, and what outlives a reboot."""
