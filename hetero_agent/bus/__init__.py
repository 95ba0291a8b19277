"""The D-Bus boundary: transport, contract, callers, dispatcher, objects, signals."""
