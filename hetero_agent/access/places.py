"""Where what leases give is made, by the agent's configuration and runtime directory."""

from __future__ import annotations

from pathlib import Path

from hetero_agent import names
from hetero_agent.config import AccessTable


def is_system(runtime: Path) -> bool:
    """Whether this is the runtime directory of the system's own agent, not of one in a test."""
    return runtime == Path(names.RUNTIME_DIR)


def specifications(table: AccessTable, runtime: Path) -> Path | None:
    """The directory that CDI specifications go to, None for none."""
    if table.cdi_directory == "auto":
        return Path(names.CDI_DIR) if is_system(runtime) else runtime / "cdi"
    return Path(table.cdi_directory) if table.cdi_directory else None
