"""Replay: an attempt that asks what an earlier one asked gets the same tokens, and no engine is asked."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.identity import RolloutId
from contracts.sessions import CallRecord, CallTimings, OpenSession, ReplayConfig, ReplayLevel, Sampling, SegmentReason, SessionLimits
from proxy.canonical import Message, Question
from proxy.graph import Graph
from proxy.replay import Divergence, Match, Replay
from proxy.sessions import Session
from proxy.volatile import rules_of
from tests.proxy.clients import Client, call_text, user
from tests.proxy.test_graph import ask, assistant, chat
from tests.proxy.test_proxy import eventually
from tests.support.proxy import Proxy, proxy_server
from tests.support.stub_engine import StubEngine, stub_engine

# The record and the two that follow it: without an engine, over any tree of calls.

Noise = Callable[[int], str]  # number of a message to what a harness writes into it
Turn = tuple[int | None, int]  # which earlier turn this one goes on from, and what its command printed
TIMINGS = CallTimings(arrived=0, waited=0, first_token=0, total=0)


@st.composite
def trees(draw: st.DrawFn, repeats: bool = True) -> list[Turn]:
    """Turns of a harness: most go on from an earlier one, some begin anew; with `repeats`, some may ask the very same."""
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        turns.append((parent, draw(st.integers(0, 2)) if repeats else number))
    return turns


def chains(length: int) -> list[Turn]:
    return [(number - 1 if number else None, number) for number in range(length)]


def quiet(_: int) -> str:
    return "0.1"


class Harness:
    """Asks the turns of a tree, with volatile text of its own in every message."""

    def __init__(self, turns: list[Turn], noise: Noise) -> None:
        self.turns = turns
        self.noise = noise
        self.histories: list[list[Message]] = []

    def question(self) -> Question:
        """The next one."""
        number = len(self.histories)
        parent, printed = self.turns[number]
        noise = self.noise(number)
        if parent is None:
            return chat([{"role": "system", "content": f"<cwd>/work/{noise}</cwd>"}, {"role": "user", "content": f"task {printed}"}])
        history = self.histories[parent]
        text = f"Wall time: {noise} seconds\nOutput:\nprinted {printed}"
        return chat([*history, {"role": "tool", "tool_call_id": history[-1]["tool_calls"][0]["id"], "content": text}])

    def hear(self, question: Question, answer: Message) -> None:
        self.histories.append([*question.messages, answer])


def record(turns: list[Turn], noise: Noise = quiet) -> Graph:
    """What the proxy recorded of a first attempt."""
    graph, harness = Graph(), Harness(turns, noise)
    for number in range(len(turns)):
        question = harness.question()
        call = graph.asked_before(question) or ask(graph, question, assistant(f"a{number}", [{"n": number}], first_id=10 * number))
        harness.hear(question, call.record.answer)
    return graph


def follow(source: Graph, turns: list[Turn], noise: Noise = quiet) -> tuple[Graph, Divergence | None]:
    """A second attempt, up to where it parts from the record. The proxy restarts before each of its questions."""
    graph, harness = Graph(), Harness(turns, noise)
    for _ in turns:
        question = harness.question()
        call = graph.asked_before(question)
        if call is None:
            found = find(source, graph, question)
            if not isinstance(found, Match):
                return graph, found
            call = found.call("t", len(graph.calls), question, graph, TIMINGS)
            graph.add(call)
        harness.hear(question, call.record.answer)
    return graph, None


def find(source: Graph, graph: Graph, question: Question) -> Match | Divergence | None:
    return Replay("s", source, rules_of("codex")).find(graph, question, graph.place(question))


def facts(record: CallRecord) -> dict[str, Any]:
    """All of a record but whose it is."""
    return record.model_dump(exclude={"session_id", "timings", "replayed"})


def full(graph: Graph) -> list[dict[str, Any]]:
    return [facts(call.full) for call in graph.calls.values()]


@given(trees())
def test_any_session_asked_again_is_recorded_again_token_by_token(turns: list[Turn]) -> None:
    source = record(turns)
    graph, divergence = follow(source, turns)
    assert divergence is None
    assert full(graph) == full(source)
    assert {call.record.replayed.level for call in graph.calls.values() if call.record.replayed} == {ReplayLevel.EQUAL}


@given(trees(repeats=False), st.lists(st.integers(0, 99), min_size=8, max_size=8))
def test_volatile_text_changes_neither_tokens_nor_recorded_messages(turns: list[Turn], numbers: list[int]) -> None:
    source = record(turns)
    graph, divergence = follow(source, turns, lambda number: f"7.{numbers[number]}")
    assert divergence is None
    assert full(graph) == full(source)


@given(st.integers(1, 8), st.data())
def test_a_changed_digit_is_found_at_its_turn(length: int, data: st.DataObject) -> None:
    source = record(chains(length))
    turn = data.draw(st.integers(0, length - 1))
    changed = [(parent, printed + 10 * (number == turn)) for number, (parent, printed) in enumerate(chains(length))]
    graph, divergence = follow(source, changed, lambda number: f"{number}.5")
    assert divergence is not None
    assert len(graph.calls) == turn
    assert full(graph) == full(source)[:turn]
    assert "differs from character" in divergence.reason


def test_order_of_arrival_does_not_matter() -> None:
    first: list[Turn] = [(None, 0), (None, 1), (0, 5), (1, 6)]
    second: list[Turn] = [(None, 1), (0, 6), (None, 0), (2, 5)]
    graph, divergence = follow(record(first), second)
    assert divergence is None
    assert [call.record.answer["content"] for call in graph.calls.values()] == ["a1", "a3", "a0", "a2"]


def test_a_record_that_has_ended_is_no_divergence() -> None:
    graph, divergence = follow(record(chains(3)), chains(5))
    assert (len(graph.calls), divergence) == (3, None)


def test_a_compaction_is_replayed_as_one_and_one_that_the_record_has_not_is_no_divergence() -> None:
    task, title = [{"role": "user", "content": "task"}], [{"role": "user", "content": "title"}]
    summary = chat([*task, {"role": "user", "content": "summary"}], window=1)
    source = Graph()
    for number, question in enumerate((chat(task), chat(title))):
        ask(source, question, assistant(f"a{number}", []))
    assert find(source, Graph(), summary) is None
    ask(source, summary, assistant("a2", []))
    match = find(source, Graph(), summary)
    assert isinstance(match, Match)
    record = match.call("t", 0, summary, Graph(), TIMINGS).record
    assert (record.answer["content"], record.segment_reason) == ("a2", SegmentReason.COMPACTION)


def test_other_tools_and_other_terms_are_differences() -> None:
    source, task = record([(None, 0)]), Harness([(None, 0)], quiet).question().messages
    for question, reason in ((chat(task, tools=[]), "the tools differ"), (chat(task, max_tokens=5), "how the answer is asked for")):
        found = find(source, Graph(), question)
        assert isinstance(found, Divergence)
        assert reason in found.reason


def test_a_match_is_taken_until_it_is_given_back() -> None:
    replay, question = Replay("s", record([(None, 0)]), rules_of("codex")), Harness([(None, 0)], quiet).question()
    match = replay.find(Graph(), question, Graph().place(question))
    assert isinstance(match, Match)
    assert replay.find(Graph(), question, Graph().place(question)) is None
    replay.give_back(match)
    assert isinstance(replay.find(Graph(), question, Graph().place(question)), Match)


# The proxy as a process.


def printed(turn: int, noise: str) -> str:
    """What a command printed, with Codex's volatile header."""
    return f"Chunk ID: {noise * 6}\nWall time: 0.{turn}{len(noise)} seconds\nOutput:\nline {turn}"


def run(client: Client, noise: str, turns: int = 99, change: dict[int, str] | None = None) -> list[dict[str, Any]]:
    """A harness that asks up to `turns` times; returns the bodies of the replies."""
    messages = [{"role": "system", "content": f"<cwd>/{noise}</cwd>"}, user("Go.")]
    replies: list[dict[str, Any]] = []
    while len(replies) < turns:
        reply = client.chat(messages)
        assert reply.status_code == 200, reply.text
        replies.append(reply.json())
        message = replies[-1]["choices"][0]["message"]
        messages.append(message)
        for call in message.get("tool_calls") or []:
            turn = len(replies) - 1
            text = (change or {}).get(turn, printed(turn, noise))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        if not message.get("tool_calls"):
            break
    return replies


def agent(prompt: str) -> str:
    """Runs three commands."""
    return call_text(f"echo {prompt.count('<tool_response>')}") if prompt.count("<tool_response>") < 3 else "done"


CODEX: dict[str, Any] = {"labels": {"harness": "codex"}}


def second(proxy: Proxy, member: int, session: str, attempt: int = 2, **config: Any) -> tuple[str, str]:
    """Open the next attempt's session, which replays `session`."""
    return proxy.open(member, attempt=attempt, replay_of=session, replay=ReplayConfig(**{"pace": 0.0, **config}), **CODEX)


def said(reply: dict[str, Any]) -> tuple[Any, Any]:
    return reply["choices"], reply["usage"]


def test_a_replayed_session_gets_the_same_replies_and_records_the_same_tokens(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = agent
    session, key = proxy.open(member, **CODEX)
    first = run(Client(proxy.url, key), "a")
    stub.prompts.clear()
    again, key = second(proxy, member, session)
    assert [said(reply) for reply in run(Client(proxy.url, key), "b")] == [said(reply) for reply in first]
    assert stub.prompts == []
    before, after = proxy.calls(session).calls, proxy.calls(again).calls
    assert [facts(call) for call in after] == [facts(call) for call in before]
    assert [(call.replayed.session_id, call.replayed.sequence) for call in after if call.replayed] == [(session, n) for n in range(4)]
    status = proxy.close(again)
    assert status.replay is not None
    assert status.replay.hits == {ReplayLevel.EQUAL: 0, ReplayLevel.HARNESS: 4, ReplayLevel.OUTPUT: 0}
    assert status.replay.diverged_at is None
    assert proxy.status(session).state == "closed"


def test_where_the_record_ends_sampling_goes_on_from_the_recorded_tokens(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = agent
    session, key = proxy.open(member, **CODEX)
    run(Client(proxy.url, key), "a", turns=2)
    stub.prompts.clear()
    again, key = second(proxy, member, session, on_divergence="refuse")
    run(Client(proxy.url, key), "b")
    calls = proxy.calls(again).calls
    assert [bool(call.replayed) for call in calls] == [True, True, False, False]
    assert stub.prompts == [call.prompt_ids for call in calls[2:]]
    recorded = proxy.calls(session).calls[1]
    assert stub.prompts[0][: len(recorded.prompt_ids + recorded.response_ids)] == recorded.prompt_ids + recorded.response_ids
    assert "bbbbbb" in stub.text(stub.prompts[0][len(recorded.prompt_ids) :]), "what was not answered yet is this attempt's own"
    assert ([call.parent for call in calls], {call.segment for call in calls}) == ([None, 0, 1, 2], {0})
    status = proxy.status(again).replay
    assert status is not None
    assert (status.diverged_at, status.reason) == (None, "")


def test_a_difference_is_sampled_from_its_turn_on_and_named_without_its_content(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = agent
    session, key = proxy.open(member, **CODEX)
    run(Client(proxy.url, key), "a")
    stub.prompts.clear()
    again, key = second(proxy, member, session)
    run(Client(proxy.url, key), "b", change={1: printed(1, "b") + "!secret"})
    calls = proxy.calls(again).calls
    assert [bool(call.replayed) for call in calls] == [True, True, False, False]
    assert len(stub.prompts) == 2
    assert {call.segment for call in calls} == {0}
    status = proxy.close(again).replay
    assert status is not None
    assert (status.diverged_at, status.refused) == (2, False)
    assert "new message 0 (tool) differs from character" in status.reason
    assert "secret" not in status.reason
    assert proxy.status(again).replay == status, "read from the journal"


def test_a_session_that_may_only_follow_refuses_all_that_comes_after_a_difference(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = agent
    session, key = proxy.open(member, **CODEX)
    first = run(Client(proxy.url, key), "a")
    stub.prompts.clear()
    again, key = second(proxy, member, session, on_divergence="refuse")
    client = Client(proxy.url, key)
    run(client, "b", turns=1)
    message = first[0]["choices"][0]["message"]
    history = [{"role": "system", "content": "<cwd>/b</cwd>"}, user("Go."), message]
    for text in ("other", printed(0, "b")):
        refused = client.chat([*history, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "replay_diverged")
    assert stub.prompts == []
    status = proxy.status(again)
    assert status.replay is not None
    assert (status.calls, status.replay.diverged_at, status.replay.refused, status.limit_reached) == (1, 1, True, None)


@pytest.mark.parametrize("number", [11, 22])
def test_an_answer_that_uses_a_process_of_the_earlier_attempt_is_not_replayed(
    proxy: Proxy, stub: StubEngine, member: int, number: int
) -> None:
    stub.script = lambda prompt: call_text("kill 11") if "session ID 11" in prompt else agent(prompt)
    session, key = proxy.open(member, **CODEX)
    run(Client(proxy.url, key), "a", turns=2, change={0: "Process running with session ID 11"})
    again, key = second(proxy, member, session)
    run(Client(proxy.url, key), "a", turns=2, change={0: f"Process running with session ID {number}"})
    status = proxy.status(again).replay
    assert status is not None
    if number == 11:
        assert status.hits[ReplayLevel.EQUAL] == 2
    else:
        assert (status.hits[ReplayLevel.EQUAL], status.diverged_at) == (1, 1)
        assert "a name that this attempt does not have" in status.reason


def test_an_attempt_may_replay_one_that_replayed(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = agent
    session, key = proxy.open(member, **CODEX)
    run(Client(proxy.url, key), "a", turns=2)
    again, key = second(proxy, member, session)
    run(Client(proxy.url, key), "b", turns=3)
    stub.prompts.clear()
    third, key = second(proxy, member, again, attempt=3)
    run(Client(proxy.url, key), "c")
    assert [facts(call) for call in proxy.calls(third).calls[:3]] == [facts(call) for call in proxy.calls(again).calls]
    assert len(stub.prompts) == 1
    assert {call.segment for call in proxy.calls(third).calls} == {0}


def test_a_retry_of_a_replayed_request_gets_the_same_reply(proxy: Proxy, stub: StubEngine, member: int) -> None:
    session, key = proxy.open(member)
    Client(proxy.url, key).responses("hi")
    stub.prompts.clear()
    again, key = proxy.open(member, attempt=2, replay_of=session, replay=ReplayConfig(pace=0.0))
    client = Client(proxy.url, key)
    assert client.responses("hi").content == client.responses("hi").content
    (call,) = proxy.calls(again).calls
    assert (call.replays, stub.prompts) == (1, [])


def test_raw_prompts_are_replayed_by_their_tokens(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda prompt: f" and {len(prompt)}"
    session, key = proxy.open(member)
    first = Client(proxy.url, key).http.post("/v1/completions", json={"model": "policy", "prompt": "One"}).json()["choices"][0]
    prompt = proxy.calls(session).calls[0].prompt_ids + proxy.calls(session).calls[0].response_ids
    bodies = [{"model": "policy", "prompt": "One"}, {"model": "policy", "prompt": [*prompt, *prompt[:1]]}]
    Client(proxy.url, key).http.post("/v1/completions", json=bodies[1])
    stub.prompts.clear()
    again, key = proxy.open(member, attempt=2, replay_of=session, replay=ReplayConfig(pace=0.0))
    replies = [Client(proxy.url, key).http.post("/v1/completions", json=body).json() for body in bodies]
    assert replies[0]["choices"][0] == first
    assert stub.prompts == []
    assert [facts(call) for call in proxy.calls(again).calls] == [facts(call) for call in proxy.calls(session).calls]
    assert [call.parent for call in proxy.calls(again).calls] == [None, 0]


def test_opening_seals_the_session_that_is_replayed(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.gate.clear()
    session, key = proxy.open(member)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(Client(proxy.url, key).chat, [user("hi")])
        eventually(lambda: len(stub.prompts) == 1)
        again, _ = proxy.open(member, attempt=2, replay_of=session)
        assert asked.result().status_code == 401
    assert proxy.status(session).state == "closed"
    assert proxy.open(member, attempt=2, replay_of=session)[0] == again


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"replay_of": "nothing"}, 400, "does not exist"),
        ({"rollout": RolloutId(run="run", batch="iteration=000000", group=9, member=0)}, 400, "another rollout"),
        ({"attempt": 1}, 400, "not before attempt 1"),
        ({"policy": "other"}, 409, "another policy"),
        ({"sampling": Sampling(temperature=0.5)}, 409, "another sampling"),
        ({"labels": {"harness": "pi"}}, 409, "another harness"),
    ],
    ids=["unknown", "rollout", "attempt", "policy", "sampling", "harness"],
)
def test_a_session_that_cannot_be_replayed_is_refused_and_stays_open(
    proxy: Proxy, stub: StubEngine, member: int, changes: dict[str, Any], status: int, message: str
) -> None:
    opened = OpenSession(
        rollout=RolloutId(run="run", batch="iteration=000000", group=0, member=member),
        attempt=3,
        policy="run",
        sampling=Sampling(temperature=1.0),
        limits=SessionLimits(),
        deadline=time.time() + 60,
    )
    session, _ = proxy.open(member, attempt=2)
    body = opened.model_copy(update={"replay_of": session, **changes}).model_dump(mode="json")
    refused = proxy.admin.post("/sessions", json=body)
    assert refused.status_code == status
    assert message in refused.text
    assert proxy.status(session).state == "open"


def test_a_killed_proxy_goes_on_in_mid_replay(tiny_model: Path, tmp_path: Path) -> None:
    with stub_engine(tiny_model, agent) as engine:
        with proxy_server(tiny_model, {"policy": engine.url}, tmp_path) as proxy:
            session, key = proxy.open(**CODEX)
            first = run(Client(proxy.url, key), "a")
            engine.prompts.clear()
            again, key = second(proxy, 0, session)
            run(Client(proxy.url, key), "b", turns=2)
            proxy.server.kill()
        with proxy_server(tiny_model, {"policy": engine.url}, tmp_path) as proxy:
            client = Client(proxy.url, key)
            messages = [{"role": "system", "content": "<cwd>/b</cwd>"}, user("Go.")]
            for turn, reply in enumerate(first[:3]):
                message = reply["choices"][0]["message"]
                messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": printed(turn, "b")}]
            assert said(client.chat(messages[:4]).json()) == said(first[1]), "the question before the kill, again"
            for turn in (2, 3):
                assert said(client.chat(messages[: 2 + 2 * turn]).json()) == said(first[turn])
            assert engine.prompts == []
            assert [facts(call)["prompt_ids"] for call in proxy.calls(again).calls] == [
                call.prompt_ids for call in proxy.calls(session).calls
            ]


def test_a_replayed_answer_waits_for_its_time(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = agent
    session, key = proxy.open(member, **CODEX)
    run(Client(proxy.url, key), "a", turns=2)
    again, key = second(proxy, member, session, pace=0.4)
    run(Client(proxy.url, key), "b", turns=2)
    one, two = (call.timings for call in proxy.calls(again).calls)
    assert two.arrived + two.total - (one.arrived + one.total) >= 0.39


def test_the_first_answer_waits_for_nothing_and_the_next_for_what_is_left_of_the_pace() -> None:
    opened = OpenSession(
        rollout=RolloutId(run="run", batch="b", group=0, member=0), attempt=2, policy="run", sampling=Sampling(), limits=SessionLimits(),
        deadline=0, replay_of="s",
    )  # fmt: skip
    session = Session("t", opened)
    assert session.pause(100.0) == 0.0
    session.answered = 100.0
    assert [session.pause(now) for now in (100.0, 100.75, 103.0)] == [1.0, 0.25, 0.0]
