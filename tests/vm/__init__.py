"""Lab B: the agent under systemd on a real kernel with real PCI hotplug, in a virtual machine.

`image` makes disk, kernel and initrd, `saved` boots them once and keeps the running machine's
state, `machine` is one machine restored from it: commands in the guest, hotplug from outside.
docs/testing.md says how to run it and where things are kept.
"""
