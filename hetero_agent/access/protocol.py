"""What the agent and its privileged helper agree on; docs/decisions/sandbox.md has all of it."""

from __future__ import annotations

from typing import Final

VERSION: Final = 1
#: Bytes of a request and of an answer.
REQUEST_MAX: Final = 256
ANSWER_MAX: Final = 4096
