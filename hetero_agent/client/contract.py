"""Every method that the library calls: the signatures of what goes in and what comes back.

The XML files in dbus/ are the source; a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hetero_agent import names

PROPERTIES: Final = "org.freedesktop.DBus.Properties"
OBJECT_MANAGER: Final = "org.freedesktop.DBus.ObjectManager"

METHODS: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    (names.MANAGER, "Register"): ("susa{sv}", "a{sv}"),
    (names.MANAGER, "GetSnapshot"): ("u", "a{sv}a(osssssbota{sv})"),
    (names.MANAGER, "Allocate"): ("ssua{sv}", "oa{sv}"),
    (names.MANAGER, "Confirm"): ("soa{sv}", ""),
    (names.MANAGER, "Release"): ("so", "b"),
    (names.MANAGER, "Explain"): ("sua{sv}", "a{sv}a(ssbs)"),
    (names.MANAGER, "Reconcile"): ("suua{oao}", "a(sooss)"),
    (names.MANAGER, "GetConflicts"): ("", "a(sooss)"),
    (names.MANAGER, "Reap"): ("soa(ut)", "u"),
    (names.MANAGER, "CanAllocate"): ("", "s"),
    (names.MANAGER, "CanReleaseOthers"): ("", "s"),
    (names.MANAGER, "CanCordon"): ("", "s"),
    (names.MANAGER, "CanReap"): ("", "s"),
    (names.DEVICE, "GetNodes"): ("", "a(sssuu)"),
    (names.DEVICE, "GetAccess"): ("", "aa{sv}"),
    (names.DEVICE, "GetHistory"): ("u", "aa{sv}"),
    (names.DEVICE, "GetHolders"): ("", "aa{sv}"),
    (names.DEVICE, "Cordon"): ("ss", ""),
    (names.DEVICE, "Uncordon"): ("s", ""),
    (names.LEASE, "GetManifest"): ("", "a{sv}"),
    (names.LEASE, "GetRequest"): ("", "a{sv}"),
    (names.LEASE, "GetBinding"): ("", "a{sv}"),
    (names.PROVIDERS, "RegisterProvider"): ("susa{sv}", "a{sv}"),
    (names.PROVIDERS, "ReportDevices"): ("stuuaa{sv}", "a{sv}"),
    (names.PROVIDERS, "ReportHealth"): ("ssssa{sv}", ""),
    (PROPERTIES, "Get"): ("ss", "v"),
    (PROPERTIES, "GetAll"): ("s", "a{sv}"),
    (OBJECT_MANAGER, "GetManagedObjects"): ("", "a{oa{sa{sv}}}"),
}
