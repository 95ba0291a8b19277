"""The kernel's messages: from the real /dev/kmsg, from a private one, and from a real journald."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
import time

import pytest

from tests.health.listen import Listener, listening
from tests.support import kmsg
from tests.support.namespace import run_in_mount_namespace
from tests.support.wait import wait_until_async

real = pytest.mark.skipif(not kmsg.real_is_writable(), reason="/dev/kmsg can't be written here")


@real
def test_a_message_in_the_real_ring_is_heard() -> None:
    words = [f"{time.time_ns() % 10**9 + number}" for number in range(4)]

    async def test(one: Listener) -> None:
        await one.reading("kmsg")
        took = []
        for word in words:
            begun = time.monotonic()
            kmsg.say_real(f"npu 0000:3b:00.0: error {word}")
            await wait_until_async(lambda word=word: word in one.codes, what="the message")
            took.append(time.monotonic() - begun)
            [said] = [said for said in one.said if said.code == word]
            line = f"npu 0000:3b:00.0: error {word}"
            assert (said.rule, said.address, said.line) == (0, "0000:3b:00.0", line)
            assert 0 <= said.age < 10
        assert min(took) < 0.5

    listening(test, "kmsg")


@real
def test_the_real_ring_is_read_on_from_where_it_was_left() -> None:
    words = [f"{time.time_ns() % 10**9 + number}" for number in range(3)]

    async def first(one: Listener) -> None:
        await one.reading("kmsg")
        kmsg.say_real(f"npu 0000:3b:00.0: error {words[0]}")
        await one.until(words[0])

    async def then(one: Listener) -> None:
        await one.until(words[1])
        kmsg.say_real(f"npu 0000:3b:00.0: error {words[2]}")
        await one.until(*words[1:])
        assert words[0] not in one.codes

    cursor = listening(first, "kmsg").cursors[-1]
    kmsg.say_real(f"npu 0000:3b:00.0: error {words[1]}")
    listening(then, "kmsg", cursor)


@real
@pytest.mark.skipif(not os.environ.get("CI"), reason="it fills the kernel's ring: only where CI is set")
def test_messages_that_the_real_ring_overwrote_are_counted() -> None:
    """A worker that is stopped while the ring goes round: it goes on and says how many it missed."""
    word = f"{time.time_ns() % 10**9}"

    async def test(one: Listener) -> None:
        await one.reading("kmsg")
        # stopped only once it has read something: how many are missing it knows by their numbers
        kmsg.say_real(f"npu 0000:3b:00.0: error {word}0")
        await one.until(f"{word}0")
        [worker] = one.log.pids
        os.kill(worker, signal.SIGSTOP)
        await asyncio.to_thread(_flood)
        kmsg.say_real(f"npu 0000:3b:00.0: error {word}")
        os.kill(worker, signal.SIGCONT)
        await one.until(f"{word}0", word, timeout=60)
        await wait_until_async(lambda: one.lost > 0, what="what was lost")

    listening(test, "kmsg")


def _flood() -> None:
    """More than the ring holds: its size is known from how much of it can be read at once."""
    line = "hetero-agent test of an overwritten ring " + "x" * 900
    descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            for _ in range(200):
                kmsg.say_real(line)
            try:
                os.read(descriptor, 8192)
            except BrokenPipeError:
                return
    finally:
        os.close(descriptor)


def in_namespace(body: str) -> None:
    """Run BODY, which has ``journald``, ``PrivateKmsg``, ``listening`` and ``Listener``."""
    prelude = """
    import asyncio, os, signal, subprocess, time
    from tests.health.listen import Listener, listening, RULES
    from tests.support.journal import journald
    from tests.support.kmsg import PrivateKmsg
    from tests.support.wait import wait_until_async

    def error(number, where="0000:3b:00.0"):
        return f"npu {where}: error {number}"
    """
    run_in_mount_namespace(textwrap.dedent(prelude) + textwrap.dedent(body), timeout=90)


def test_kmsg_is_read_where_there_is_no_journal() -> None:
    in_namespace("""
    mount("-t", "tmpfs", "tmpfs", "/run")
    mount("-t", "tmpfs", "tmpfs", "/var/log")
    kernel = PrivateKmsg()

    async def test(one):
        await one.reading("kmsg")
        kernel.say(error(1))
        kernel.say("something else")
        kernel.say(error(2), more=" SUBSYSTEM=pci\\n DEVICE=+pci:0000:3b:00.0\\n")
        await one.until("1", "2")
        assert [said.device for said in one.said] == ["", "+pci:0000:3b:00.0"]
        kernel.say("npu: nameless", more=" SUBSYSTEM=pci\\n DEVICE=+pci:0000:3b:00.0\\n")
        await one.until("1", "2", "")
        assert (one.said[-1].rule, one.said[-1].device) == (2, "+pci:0000:3b:00.0")

    listening(test)
    """)


def test_odd_records_hurt_nobody_and_gaps_are_counted() -> None:
    in_namespace("""
    mount("-t", "tmpfs", "tmpfs", "/run")
    kernel = PrivateKmsg()

    async def test(one):
        await one.reading("kmsg")
        kernel.say(error(1))
        kernel.say(b"npu \\xff\\xfe\\x80 \\x1b[31m: error 2")
        kernel.write(b"no record at all")
        kernel.write(b"3,x,y,-;npu 0000:3b:00.0: error 77\\n")
        kernel.write(b";")
        kernel.say(b"npu 0000:3b:00.0: error 3 " + b"\\xe2\\x82" * 1000)
        await one.until("1", "3")
        kernel.say(error(4), skip=42)
        await one.until("1", "3", "4")
        await wait_until_async(lambda: one.lost == 42, what="the gap")

    listening(test, "kmsg")
    """)


def test_old_messages_are_left_alone_but_for_the_last_minutes() -> None:
    in_namespace("""
    mount("-t", "tmpfs", "tmpfs", "/run")
    kernel = PrivateKmsg()

    async def test(one):
        await one.reading("kmsg")
        kernel.say(error(1), age=700)
        kernel.say(error(2), age=500)
        await one.until("2")
        assert 500 <= one.said[0].age < 560

    listening(test, "kmsg")
    """)


def test_a_flood_passes_once_a_second_and_what_is_new_at_once() -> None:
    in_namespace("""
    mount("-t", "tmpfs", "tmpfs", "/run")
    kernel = PrivateKmsg()

    async def test(one):
        await one.reading("kmsg")
        for _ in range(5):
            kernel.say(error(1))
        kernel.say("npu 0000:3b:00.0: well")
        kernel.say(error(1))
        await one.until("1", "", "1")
        assert len(one.said) == 3
        await asyncio.sleep(1.1)
        for _ in range(5):
            kernel.say(error(1))
        await asyncio.sleep(1.1)
        kernel.say(error(1))
        await one.until("1", "", "1", "1", "1")
        assert one.said[-1].repeated == 4

    listening(test, "kmsg")
    """)


def test_the_journals_kernel_stream_is_read_and_read_on() -> None:
    in_namespace("""
    with journald(kmsg=True) as journal:
        journal.kernel.say("Linux version 6.1")
        subprocess.run(["systemd-cat", "-t", "kernel", "echo", error(66)], check=True)
        journal.entries()

        async def test(one):
            await one.reading("journal")
            begun = time.monotonic()
            journal.kernel.say(error(1), more=" SUBSYSTEM=pci\\n DEVICE=+pci:0000:3b:00.0\\n")
            await one.until("1")
            assert time.monotonic() - begun < 10
            assert one.said[0].device == "+pci:0000:3b:00.0"
            journal.kernel.say(error(2, "0000:AF:00"))
            await one.until("1", "2")
            assert one.said[1].address == "0000:AF:00"

        first = listening(test)
        assert first.codes == ["1", "2"], "what a program says of itself is not the kernel's word"
        journal.kernel.say(error(3))

        async def then(one):
            await one.until("3")
            assert one.codes == ["3"]

        listening(then, "auto", first.cursors[-1])
        listening(then, "journal", first.cursors[-1])
    """)


def test_it_survives_rotation_vacuum_and_a_new_journald() -> None:
    in_namespace("""
    with journald(kmsg=True) as journal:
        journal.kernel.say("Linux version 6.1")
        journal.entries()

        async def test(one):
            await one.reading("journal")
            number = 0
            for what in (journal.rotate, journal.rotate, vacuum, restart):
                number += 1
                journal.kernel.say(error(number))
                await one.until(str(number))
                await asyncio.to_thread(what)
                number += 1
                journal.kernel.say(error(number))
                await one.until(str(number))
            assert one.codes == [str(one + 1) for one in range(number)], one.codes
            assert one.log.problem == ""

        def vacuum():
            journal.rotate()
            command = ["journalctl", "-D", "/run/log/journal", "--vacuum-files=1"]
            subprocess.run(command, check=True, capture_output=True)

        def restart():
            journal.stop()
            journal.start()

        listening(test)
    """)


def test_text_that_is_no_utf8_comes_through_the_journal() -> None:
    in_namespace("""
    with journald(kmsg=True) as journal:
        journal.kernel.say("Linux version 6.1")
        journal.entries()

        async def test(one):
            await one.reading("journal")
            journal.kernel.say(b"npu 0000:3b:00.0: error 1 \\xff\\xfe\\x80")
            await one.until("1")
            assert one.said[0].line.startswith("npu 0000:3b:00.0: error 1 ")

        listening(test)
    """)


def test_a_reader_that_dies_is_replaced_and_misses_nothing() -> None:
    in_namespace("""
    with journald(kmsg=True) as journal:
        journal.kernel.say("Linux version 6.1")
        journal.entries()

        async def test(one):
            await one.reading("journal")
            journal.kernel.say(error(1))
            await one.until("1")
            [worker] = one.log.pids
            os.kill(worker, signal.SIGKILL)
            await wait_until_async(lambda: worker not in one.log.pids, what="its end")
            assert "ended" in one.log.problem
            journal.kernel.say(error(2))
            await one.until("1", "2")
            assert one.log.problem == ""

        listening(test)
    """)


def test_where_nothing_can_be_read_it_is_told() -> None:
    in_namespace("""
    mount("-t", "tmpfs", "tmpfs", "/run")
    mount("-t", "tmpfs", "tmpfs", "/var/log")
    Path("/run/nothing").mkdir()
    mount("-t", "tmpfs", "tmpfs", "/run/nothing")

    async def test(one):
        await wait_until_async(lambda: one.log.problem, what="the problem")
        assert one.log.source == ""
        assert one.log.problem == "No such device or address", one.log.problem

    import socket
    nobody = socket.socket(socket.AF_UNIX)
    nobody.bind("/run/kmsg")
    mount("--bind", "/run/kmsg", "/dev/kmsg")
    listening(test, "kmsg")
    """)


def test_the_services_own_user_reads_the_journal_by_its_capability() -> None:
    """As the unit runs it: no root, no group, no /dev/kmsg, but CAP_DAC_READ_SEARCH."""
    in_namespace("""
    from hetero_agent.health.kernlog import COMMAND

    def as_user(caps):
        rights = ["--inh-caps", caps, "--ambient-caps", caps] if caps != "-all" else ["--inh-caps", "-all"]
        return ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *rights, *COMMAND)

    with journald(kmsg=True) as journal:
        Path("/run/kmsg").chmod(0o600)
        journal.kernel.say("Linux version 6.1")
        journal.entries()
        Path("/run/log/journal").chmod(0o750)

        async def may(one):
            await one.reading("journal")
            journal.kernel.say(error(1))
            await one.until("1")
            assert one.log.problem == ""

        async def may_not(one):
            await wait_until_async(lambda: one.log.problem, what="the problem")
            assert "/dev/kmsg: Permission denied" in one.log.problem or "Permission" in one.log.problem

        listening(may, command=as_user("-all,+dac_read_search"))
        listening(may_not, command=as_user("-all"))
    """)


def test_a_journal_without_kernel_messages_is_doubted_until_one_comes() -> None:
    in_namespace("""
    import socket

    with journald(kmsg=True) as journal:
        async def test(one):
            await one.reading("journal")
            assert one.log.problem.startswith("the journal has none"), one.log.problem
            journal.kernel.say(error(1))
            await one.until("1")
            await wait_until_async(lambda: not one.log.problem, what="the end of the doubt")

        nobody = socket.socket(socket.AF_UNIX)  # what can't be opened, not even by root
        nobody.bind("/run/nobody")
        mount("--bind", "/run/nobody", "/dev/kmsg")
        listening(test)
    """)


def test_a_worker_that_can_not_start_is_told_and_off_is_off() -> None:
    async def test(one: Listener) -> None:
        await wait_until_async(lambda: one.log.problem, what="the problem")
        assert "No such file" in one.log.problem

    listening(test, "kmsg", command=("/no/such/python",))

    async def silent(one: Listener) -> None:
        await asyncio.sleep(0.3)
        assert (one.log.pids, one.log.problem, one.log.source) == (set(), "", "")

    listening(silent, "off")
    listening(silent, "kmsg", rules=())
