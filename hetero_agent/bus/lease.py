"""org.heteroagent.Agent1.Lease: what the owner alone may read."""

from __future__ import annotations

from hetero_agent import names
from hetero_agent.bus import values
from hetero_agent.bus.calls import Call, Entry, Result, Table
from hetero_agent.core.model import Lease
from hetero_agent.core.ports import Engine


class Leases:
    """Handlers of the Lease interface; the dispatcher has made sure that the lease exists."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def table(self) -> Table:
        """The rows of the dispatcher."""
        return {
            f"{names.LEASE}.GetManifest": Entry(self._manifest, subject=self._lease),
            f"{names.LEASE}.GetRequest": Entry(self._request, subject=self._lease),
            f"{names.LEASE}.GetBinding": Entry(self._binding, subject=self._lease),
        }

    def _lease(self, call: Call) -> Lease:
        return self._engine.view.leases[names.lease_id_of(call.path)]

    def _manifest(self, call: Call) -> Result:
        lease = self._lease(call)
        manifest = dict(lease.manifest)
        if lease.confirmed:
            manifest.update({"confirm-by": 0, "confirm-by-boottime": 0})
        return (values.manifest(manifest),)

    def _request(self, call: Call) -> Result:
        return (values.request(self._lease(call).request),)

    def _binding(self, call: Call) -> Result:
        return (values.binding(self._lease(call).binding),)
