"""The D-Bus boundary: transport, contract, callers, dispatcher, objects, signals."""

import importlib
import sys

# dbus-next loads PyGObject where that is installed, for a half of it that is not used here: 3.7 MiB of
# an agent's memory.  It does without if that can't be imported.
if "gi" not in sys.modules and "dbus_next" not in sys.modules:
    sys.modules["gi"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("dbus_next")
    finally:
        del sys.modules["gi"]
