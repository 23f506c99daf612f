"""kill -9 of the proxy: no finished call is lost, and a re-sent request gets the recorded answer."""

import threading
from pathlib import Path

import httpx

from tests.proxy.clients import Client, user
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
