"""Commits grants to a ledger as fast as it can, and writes each number once it is stored; the test
kills it.  Arguments: the file, the first number."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hetero_agent.store.ledger import SqliteLedger
from tests.store import samples


def main() -> None:
    ledger = SqliteLedger(Path(sys.argv[1]), samples.now)
    ledger.load(samples.now())
    number = int(sys.argv[2])
    while True:
        one = samples.lease(number)
        ledger.commit(
            samples.changes(
                samples.audit(2 * number - 1),
                samples.audit(2 * number),
                leases={one.id: one},
                requests={one.key: samples.request(number)},
                debts={samples.DEVICE: samples.debt(number)},
            )
        )
        os.write(1, f"{number}\n".encode())
        if number % 7 == 0:
            ledger.taken([row.sequence for row in ledger.outbox(0, 1000)])
        number += 1


if __name__ == "__main__":
    main()
