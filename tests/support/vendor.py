"""A vendor's provider as a test needs one: file-backed devices, reported by GLib's D-Bus."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hetero_agent import names
from tests.support.agent import AgentProcess
from tests.support.calls import Client, V

#: What `Vendor` devices are unless told otherwise.
RESOURCE = "example.com/npu"

_PAGE = 64


class Vendor:
    """Registered as provider ``vendor`` of AGENT; its files lie in AGENT's vendor directory."""

    def __init__(self, agent: AgentProcess) -> None:
        self.directory = agent.directory / "vendor"
        self.client = Client(agent.bus, listen=False)
        self.version = 0
        self.devices: dict[str, dict[str, Any]] = {}
        self._requests = 0
        self.session = self.register()

    def _request(self) -> str:
        self._requests += 1
        return f"{self.client.unique_name}-{self._requests}"

    def register(self) -> dict[str, Any]:
        session = self._call("RegisterProvider", "susa{sv}", self._request(), 1, "vendor", {})
        return dict(session)

    def _call(self, member: str, signature: str, *values: Any) -> Any:
        return self.client.call(names.ROOT, names.PROVIDERS, member, signature, *values)

    def file(self, device_id: str) -> Path:
        """The file that stands for the device; everybody may open it."""
        return self.directory / device_id

    def add(self, *ids: str, resource: str = RESOURCE, **more: Any) -> None:
        """Add devices, each with a file as its own node, and report.  MORE are `V` by key."""
        for one in ids:
            path = self.file(one)
            path.touch()
            path.chmod(0o666)
            keys = {key.replace("_", "-"): value for key, value in more.items()}
            self.devices[one] = {
                "id": V("s", one),
                "resource": V("s", resource),
                "nodes": V("a(ss)", [(str(path), "own")]),
                **keys,
            }
        self.report()

    def remove(self, *ids: str) -> None:
        """Take devices out of the report."""
        for one in ids:
            del self.devices[one]
        self.report()

    def report(self) -> dict[str, Any]:
        """Report the full list under the next version; return the answer to the last page."""
        self.version += 1
        devices = list(self.devices.values())
        pages = [devices[at : at + _PAGE] for at in range(0, len(devices), _PAGE)] or [[]]
        answer: dict[str, Any] = {}
        for number, page in enumerate(pages):
            answer = self._call(
                "ReportDevices", "stuuaa{sv}", self._request(), self.version, number, len(pages), page
            )
        return answer

    def health(self, device_id: str, health: str, reason: str = "") -> None:
        self._call("ReportHealth", "ssssa{sv}", self._request(), device_id, health, reason, {})

    def wait_idle(self, ids: Iterable[str] | None = None) -> None:
        """Wait until the devices (all) are idle on the bus."""
        for one in self.devices if ids is None else ids:
            self.client.wait_for_device(one, State="idle")

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Vendor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
