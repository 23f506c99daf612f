"""kill -9 of the proxy: no finished call is lost, and a re-sent request gets the recorded answer."""

import asyncio
import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import httpx

from proxy.graph import Call
from proxy.journal import Journal
from tests.proxy.clients import Client, user
from tests.proxy.test_journal import OPENED, conversation
from tests.support.processes import free_port
from tests.support.proxy import proxy_server
from tests.support.stub_engine import stub_engine


def test_a_killed_proxy_has_lost_no_call_that_was_answered(tiny_model: Path, tmp_path: Path) -> None:
    answered: list[tuple[int, int, str]] = []
    port = free_port()
    numbers = iter(range(10**6))
    with stub_engine(tiny_model, lambda _: f"answer {next(numbers)}") as engine:
        with proxy_server(tiny_model, {"policy": engine.url}, tmp_path, port=port) as proxy:
            sessions = [proxy.open(member) for member in range(8)]

            def talk(member: int) -> None:
                client = Client(proxy.url, sessions[member][1])
                history = [user("go")]
                try:
                    for turn in range(1000):
                        message = client.message(history)
                        answered.append((member, turn, message["content"]))
                        history += [message, user(str(turn))]
                except httpx.HTTPError:
                    return

            threads = [threading.Thread(target=talk, args=(member,)) for member in range(8)]
            for thread in threads:
                thread.start()
            while len(answered) < 60:
                assert any(thread.is_alive() for thread in threads)
            proxy.server.kill()
            for thread in threads:
                thread.join()
        with proxy_server(tiny_model, {"policy": engine.url}, tmp_path, port=port) as proxy:
            recorded = {member: proxy.calls(session).calls for member, (session, _) in enumerate(sessions)}
            for member, turn, content in answered:
                assert recorded[member][turn].answer["content"] == content
            member, turn, content = max(answered, key=lambda entry: entry[1])
            history = [user("go")]
            for number in range(turn):
                history += [recorded[member][number].answer, user(str(number))]
            again = Client(proxy.url, sessions[member][1]).message(history)
            if len(recorded[member]) == turn + 1:
                assert again["content"] == content
                assert proxy.calls(sessions[member][0]).calls[turn].replays == 1


def test_whatever_the_moment_of_a_kill_nothing_that_was_durable_is_lost(tmp_path: Path) -> None:
    """200 writers, each killed in the middle of its work by `kill -9`, at whatever byte it had come to."""
    template = list(conversation(40).calls.values())
    generator, path, durable = random.Random(0), tmp_path / "journal.db", 0
    for number in range(200):
        session = f"s{number}"
        calls = [replace(call, record=call.record.model_copy(update={"session_id": session})) for call in template]
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            asyncio.run(write_for_ever(path, session, calls, writer))
        os.close(writer)
        with os.fdopen(reader) as acknowledged:
            acknowledged.readline()  # the session is open
            time.sleep(generator.random() * 0.02)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            answered = {int(line) for line in acknowledged.read().split()}
        journal = Journal(path)
        stored = asyncio.run(journal.load(session))
        journal.close()
        assert stored
        assert answered <= set(stored.graph.calls), number
        for sequence, call in stored.graph.calls.items():
            assert call.record == calls[sequence].record
        durable += len(answered)
    assert durable > 200, "the writers were killed while they wrote"


async def write_for_ever(path: Path, session: str, calls: list[Call], acknowledged: int) -> NoReturn:
    """Record the calls four at a time, and say so when they are durable."""
    journal = Journal(path)
    await journal.open_session(session, OPENED)
    os.write(acknowledged, b"open\n")

    async def write(call: Call) -> None:
        await journal.add_call(call)
        os.write(acknowledged, f"{call.record.sequence}\n".encode())

    for start in range(0, len(calls), 4):
        await asyncio.gather(*map(write, calls[start : start + 4]))
    while True:
        await asyncio.sleep(1)
