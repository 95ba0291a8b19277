"""The yardstick: a service that does nothing, written with dbus-next as bare as it goes.

``echo.py ADDRESS`` owns NAME and answers every call to MEMBER with the body, in the signature, that
the last ``Teach`` of that member gave, or with none.  What the agent adds to that is the agent's own.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from dbus_next import Message, MessageType
from dbus_next.aio import MessageBus

NAME = "org.heteroagent.Bench"
PATH = "/org/heteroagent/Bench"

#: Rules for the bus of the benchmark.
POLICY = f"""
  <policy context="default">
    <allow own="{NAME}"/>
    <allow send_destination="{NAME}"/>
  </policy>
"""


async def main(address: str) -> None:
    bus = await MessageBus(bus_address=address).connect()
    answers: dict[str, tuple[str, list[Any]]] = {}

    def handle(message: Message) -> Message | bool:
        if message.message_type is not MessageType.METHOD_CALL or message.path != PATH:
            return False
        if message.member == "Teach":
            member, signature, body = message.body
            answers[member] = (signature, body.value)
            return Message.new_method_return(message)
        signature, values = answers.get(message.member, ("", []))
        return Message.new_method_return(message, signature, values)

    bus.add_message_handler(handle)
    await bus.request_name(NAME)
    print("ready", flush=True)
    await bus.wait_for_disconnect()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
