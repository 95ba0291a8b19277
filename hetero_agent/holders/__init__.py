"""Who has a device open or mapped, whose process that is, and ending it.

`edge` is the door for the daemon; nothing is imported here, because the scan worker starts from
this package too and has to stay small.
"""
