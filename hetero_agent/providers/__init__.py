"""What vendors' processes report over the bus, checked and turned into device records."""
