"""The proxy as a process, with a StubEngine behind it: sessions, turns, limits, repeats, an engine in trouble."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from contracts.failures import Limit
from contracts.sessions import Sampling, SegmentReason, SessionLimits, VersionSpan
from tests.proxy.clients import FLAT_TOOL, TOOL, Client, call_text, events, user
from tests.support.proxy import ADMIN, Proxy, proxy_server
from tests.support.stub_engine import StubEngine


def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def agent(prompt: str) -> str:
    """Runs a command as often as it has seen fewer than three outputs, then says that it is done."""
    return call_text(f"echo {prompt.count('<tool_response>')}") if prompt.count("<tool_response>") < 3 else "done"


def run_chat_agent(client: Client) -> list[dict[str, Any]]:
    """A harness's loop; returns the conversation."""
    messages = [{"role": "system", "content": "You are an agent."}, user("Go.")]
    while True:
        message = client.message(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return messages
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message["tool_calls"]]


def test_a_conversation_with_tools_is_one_segment_that_grows_token_by_token(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = agent
    session, key = proxy.open(member)
    conversation = run_chat_agent(Client(proxy.url, key))
    assert conversation[-1]["content"] == "done"
    calls = proxy.calls(session).calls
    assert [call.sequence for call in calls] == [0, 1, 2, 3]
    assert [call.parent for call in calls] == [None, 0, 1, 2]
    assert {call.segment for call in calls} == {0}
    for earlier, later in zip(calls, calls[1:], strict=False):
        recorded = earlier.prompt_ids + earlier.response_ids
        assert later.prompt_ids[: len(recorded)] == recorded
    assert [call.prompt_ids for call in calls] == stub.prompts
    assert [call.finish_reason for call in calls] == ["tool_calls"] * 3 + ["stop"]
    assert all(len(call.logprobs) == len(call.response_ids) == call.versions[-1].end for call in calls)
    assert calls[0].logprobs == pytest.approx([-0.001 * (token + 1) for token in calls[0].response_ids])
    status = proxy.close(session)
    assert (status.calls, status.segments, status.limit_reached, status.engine_failures) == (4, 1, None, 0)


def test_text_is_streamed_while_the_engine_makes_it(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: "one two three"
    stub.gate.clear()
    _, key = proxy.open(member)
    client = Client(proxy.url, key)
    body = {"model": "policy", "input": "hi", "stream": True}
    with client.http.stream("POST", "/v1/responses", json=body) as reply:
        lines = reply.iter_lines()
        shown = ""
        while "three" not in shown:
            if (line := next(lines)).startswith("data: "):
                (event,) = events(line)
                shown += event.get("delta", "")
        stub.gate.set()  # only now may the engine finish
        rest = "\n".join(lines)
    assert events(rest)[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    ("path", "body", "whole"),
    [
        ("/v1/chat/completions", {"messages": [user("hi")], "tools": [TOOL]}, '"finish_reason":"'),
        ("/v1/responses", {"input": "hi", "tools": [FLAT_TOOL]}, "response.output_item.done"),
        (
            "/v1/messages",
            {"messages": [user("hi")], "tools": [{"name": "run", "input_schema": {}}], "max_tokens": 99},
            "content_block_stop",
        ),
    ],
)
def test_a_tool_call_is_streamed_while_it_is_sampled_and_is_whole_only_when_it_is_durable(
    proxy: Proxy, stub: StubEngine, member: int, path: str, body: dict[str, Any], whole: str
) -> None:
    stub.script = lambda _: call_text("echo one two three")
    stub.gate.clear()
    session, key = proxy.open(member)
    client = Client(proxy.url, key)
    with client.http.stream("POST", path, json={"model": "policy", "stream": True, **body}) as reply:
        shown = ""
        parts = reply.iter_text()
        while "three" not in shown:
            shown += next(parts)
        assert whole not in shown
        assert proxy.calls(session).calls == []
        stub.gate.set()  # only now may the engine finish
        assert whole in "".join(parts)


def test_the_engine_decides_sampling_and_the_harness_may_only_ask_for_less(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: "a b c d e f g h i j k l m n o p q r s t u v w x y z"
    _, key = proxy.open(member, sampling=Sampling(temperature=1.0, max_tokens=8))
    client = Client(proxy.url, key)
    for asked, given in ((3, 3), (5000, 8), (None, 8)):
        reply = client.chat([user(f"ask for {asked}")], temperature=0.1, max_tokens=asked).json()
        assert reply["usage"]["completion_tokens"] == given
        assert reply["choices"][0]["finish_reason"] == "length"


def test_an_unknown_key_is_refused_counted_and_opens_nothing(proxy: Proxy) -> None:
    before, sessions = (
        proxy.metric('openforge_proxy_unauthorized_total{scope="session"}'),
        proxy.metric("openforge_proxy_open_sessions"),
    )
    for key in ("x", "of-x-y", "of-" + "0" * 20 + "-" + "0" * 40, ADMIN):
        reply = httpx.post(f"{proxy.url}/v1/responses", headers={"authorization": f"Bearer {key}"}, json={"input": "hi"})
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert f'"{key}"' not in reply.text
    assert httpx.post(f"{proxy.url}/s/of-x-y/v1/chat/completions", json={}).status_code == 401
    assert proxy.metric('openforge_proxy_unauthorized_total{scope="session"}') == before + 5
    assert proxy.metric("openforge_proxy_open_sessions") == sessions


def test_a_key_opens_neither_the_session_api_nor_another_session(proxy: Proxy, stub: StubEngine, member: int) -> None:
    session, key = proxy.open(member)
    _, other = proxy.open(member + 100_000)
    for path in (f"/sessions/{session}", f"/sessions/{session}/calls"):
        assert httpx.get(proxy.url + path, headers={"authorization": f"Bearer {key}"}).status_code == 401
    Client(proxy.url, other).message([user("hi")])
    assert proxy.status(session).calls == 0


@pytest.mark.parametrize("where", ["bearer", "x-api-key", "path", "unix socket"])
def test_the_key_may_come_in_any_of_these_places(proxy: Proxy, stub: StubEngine, member: int, where: str) -> None:
    session, key = proxy.open(member)
    transport = httpx.HTTPTransport(uds=str(proxy.socket)) if where == "unix socket" else None
    headers = {"x-api-key": key} if where == "x-api-key" else {} if where == "path" else {"authorization": f"Bearer {key}"}
    prefix = f"/s/{key}" if where == "path" else ""
    with httpx.Client(base_url=proxy.url, transport=transport, headers=headers) as client:
        assert client.get(f"{prefix}/v1/models").json()["data"][0]["id"] == "policy"
        assert client.post(f"{prefix}/v1/responses", json={"input": "hi"}).status_code == 200
    assert proxy.status(session).calls == 1


def test_the_unix_socket_has_no_session_api(proxy: Proxy) -> None:
    with httpx.Client(base_url=proxy.url, transport=httpx.HTTPTransport(uds=str(proxy.socket))) as client:
        for path in ("/sessions/x", "/metrics"):
            assert client.get(path, headers={"authorization": f"Bearer {ADMIN}"}).status_code == 404


def test_opening_a_session_twice_gives_the_same_session(proxy: Proxy, stub: StubEngine, member: int) -> None:
    deadline = time.time() + 60
    first = proxy.open(member, deadline=deadline)
    assert proxy.open(member, deadline=deadline + 5) == first
    terms: dict[str, Any] = {"rollout": {"run": "run", "batch": "iteration=000000", "group": 0, "member": member}}
    terms |= {"attempt": 1, "policy": "other", "sampling": {}, "limits": {}, "deadline": deadline}
    assert proxy.admin.post("/sessions", json=terms).status_code == 409
    assert proxy.admin.post("/sessions", json={**terms, "engine": "none"}).json()["error"]["message"].endswith("there are: policy")
    assert proxy.admin.post("/sessions", json={**terms, "polcy": "x"}).status_code == 422
    assert proxy.admin.get("/sessions/nothing").status_code == 404


def test_a_closed_session_refuses_calls_and_keeps_its_record(proxy: Proxy, stub: StubEngine, member: int) -> None:
    session, key = proxy.open(member)
    client = Client(proxy.url, key)
    client.message([user("hi")])
    assert proxy.close(session).state == "closed"
    assert client.chat([user("again")]).status_code == 401
    assert proxy.close(session).calls == 1
    assert proxy.open(member)[0] == session
    assert proxy.status(session).state == "closed"
    assert len(proxy.calls(session).calls) == 1


def test_closing_a_session_ends_the_call_in_flight_without_a_record(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.gate.clear()
    session, key = proxy.open(member)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(Client(proxy.url, key).chat, [user("hi")])
        eventually(lambda: len(stub.prompts) == 1)
        assert proxy.close(session).calls == 0
        assert asked.result().status_code == 401


def test_a_repeated_request_gets_the_recorded_answer_byte_for_byte(proxy: Proxy, stub: StubEngine, member: int) -> None:
    answers = iter(["first", "second"])
    stub.script = lambda _: next(answers)
    session, key = proxy.open(member)
    client = Client(proxy.url, key)
    first = client.responses("hi")
    assert client.responses("hi").content == first.content
    assert client.responses("hi", metadata={"retry": "1"}).content == first.content
    assert events(client.responses("hi", stream=True).text)[-1]["response"] == first.json()
    assert len(stub.prompts) == 1
    (call,) = proxy.calls(session).calls
    assert call.replays == 3


def test_the_same_words_after_the_harness_went_on_are_a_new_question(proxy: Proxy, stub: StubEngine, member: int) -> None:
    answers = iter(["first", "next", "second"])
    stub.script = lambda _: next(answers)
    _, key = proxy.open(member)
    client = Client(proxy.url, key)
    first = client.message([user("hi")])
    client.message([user("hi"), first, user("go on")])
    assert client.message([user("hi")])["content"] == "second"


def test_a_repeat_of_a_request_in_flight_joins_it(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.gate.clear()
    session, key = proxy.open(member)
    joined = proxy.metric('openforge_proxy_replays_total{how="joined"}')
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(Client(proxy.url, key).chat, [user("hi")]) for _ in range(3)]
        eventually(lambda: proxy.metric('openforge_proxy_replays_total{how="joined"}') == joined + 2)
        stub.gate.set()
        assert len({future.result().content for future in asked}) == 1
    assert len(stub.prompts) == 1
    assert proxy.status(session).calls == 1


def test_a_call_whose_client_went_away_is_finished_and_kept_for_its_return(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.gate.clear()
    session, key = proxy.open(member)
    client = Client(proxy.url, key)
    with pytest.raises(httpx.ReadTimeout):
        client.http.post("/v1/chat/completions", json={"messages": [user("hi")]}, timeout=0.5)
    stub.gate.set()
    eventually(lambda: proxy.status(session).calls == 1)
    assert client.http.post("/v1/chat/completions", json={"messages": [user("hi")]}).status_code == 200
    assert len(stub.prompts) == 1


@pytest.mark.parametrize(
    ("limits", "limit"), [(SessionLimits(calls=2), Limit.CALLS), (SessionLimits(tokens=3), Limit.TOKENS)], ids=["calls", "tokens"]
)
def test_a_used_up_limit_is_a_400_and_is_in_the_status(
    proxy: Proxy, stub: StubEngine, member: int, limits: SessionLimits, limit: Limit
) -> None:
    stub.script = lambda _: "OK"
    session, key = proxy.open(member, limits=limits)
    client = Client(proxy.url, key)
    replies = [client.chat([user(str(number))]) for number in range(4)]
    assert [reply.status_code for reply in replies][-1] == 400
    assert replies[-1].json()["error"]["code"] == "session_limit_reached"
    assert proxy.status(session).limit_reached is limit
    assert client.chat([user("0")]).status_code == 200, "a recorded answer is still given"


def test_after_the_deadline_calls_are_refused(proxy: Proxy, stub: StubEngine, member: int) -> None:
    session, key = proxy.open(member, deadline=time.time() - 1)
    assert Client(proxy.url, key).chat([user("hi")]).status_code == 400
    assert proxy.status(session).limit_reached is Limit.WALL_CLOCK


def test_a_prompt_that_fills_the_context_window_is_told_so(tiny_model: Path, stub: StubEngine, tmp_path: Path, member: int) -> None:
    with proxy_server(tiny_model, {"policy": stub.url}, tmp_path, arguments=("--max-context", "400")) as proxy:
        stub.script = lambda _: "word " * 500
        session, key = proxy.open(member)
        client = Client(proxy.url, key)
        reply = client.responses("hi", tools=[]).json()
        assert reply["status"] == "incomplete"
        assert proxy.status(session).limit_reached is Limit.CONTEXT
        assert reply["usage"]["total_tokens"] == 400
        refused = client.responses("word " * 500, tools=[])
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_troubles_of_the_engine_stay_inside_the_proxy(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.troubles += ["503", "cut", "503"]
    session, key = proxy.open(member)
    assert Client(proxy.url, key).message([user("hi")])["content"] == "OK"
    (call,) = proxy.calls(session).calls
    assert call.response_ids == stub.answer_to(call.prompt_ids)
    assert proxy.status(session).engine_failures == 0


def test_an_aborted_answer_is_continued_and_its_spans_show_both_versions(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: "a long answer"
    stub.troubles += ["abort"]
    stub.label_after_abort = "run@1"
    session, key = proxy.open(member)
    assert Client(proxy.url, key).message([user("hi")])["content"] == "a long answer"
    (call,) = proxy.calls(session).calls
    assert call.versions == [VersionSpan(version=0, start=0, end=2), VersionSpan(version=1, start=2, end=len(call.response_ids))]
    assert stub.prompts[1] == call.prompt_ids + call.response_ids[:2]


def test_a_stream_whose_text_was_shown_is_given_up_rather_than_mixed(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: "one two three"
    stub.troubles += ["cut"]
    session, key = proxy.open(member)
    client = Client(proxy.url, key)
    cut = events(client.responses("hi", stream=True).text)
    assert cut[-1]["type"] == "response.failed"
    assert cut[-1]["response"]["error"]["code"] == "answer_cut"
    assert proxy.status(session).calls == 0
    assert events(client.responses("hi", stream=True).text)[-1]["type"] == "response.completed"


def test_an_answer_that_breaks_off_goes_on_where_it_was_if_it_is_certain_whose_tokens_it_has(
    proxy: Proxy, stub: StubEngine, member: int
) -> None:
    stub.script = lambda _: " ".join(f"word{number}" for number in range(40))
    stub.troubles += ["late cut"]
    stub.gate.clear()
    session, key = proxy.open(member)
    client = Client(proxy.url, key)
    with client.http.stream("POST", "/v1/responses", json={"input": "hi", "stream": True}) as reply:
        parts, shown = reply.iter_text(), ""
        while "word38" not in shown:
            shown += next(parts)
        probes = stub.probes
        eventually(lambda: stub.probes > probes)  # the engine has said what it holds while it sampled
        stub.gate.set()
        rest = "".join(parts)
    assert events(rest)[-1]["response"]["output"][0]["content"][0]["text"].endswith("word39")
    (call,) = proxy.calls(session).calls
    assert stub.prompts[1] == call.prompt_ids + call.response_ids[: len(stub.prompts[1]) - len(call.prompt_ids)]
    assert stub.text(call.response_ids) == stub.script("") + "<|im_end|>"
    assert call.versions == [VersionSpan(version=0, start=0, end=len(call.response_ids))]


def test_a_call_waits_for_weights_of_its_own_policy(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.label = "another@4"
    deadline = time.monotonic() + 20
    while "another@4" not in proxy.admin.get("/readyz").text:  # it looks at the label every two seconds
        assert time.monotonic() < deadline
    session, key = proxy.open(member)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(Client(proxy.url, key).chat, [user("hi")])
        time.sleep(0.5)
        assert not asked.done()
        assert stub.prompts == []
        stub.label = "run@7"
        assert asked.result(20).status_code == 200
    (call,) = proxy.calls(session).calls
    assert {span.version for span in call.versions} == {7}
    assert call.timings.waited > 0.4


def test_an_engine_that_never_comes_back_is_not_the_agents_limit(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.label = "default"
    time.sleep(2.5)
    session, key = proxy.open(member, deadline=time.time() + 1)
    reply = Client(proxy.url, key).chat([user("hi")])
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "engine_unavailable"
    status = proxy.status(session)
    assert (status.engine_failures, status.limit_reached) == (1, None)


def test_a_malformed_tool_call_is_text_and_nobodys_failure(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: '<tool_call>\n{"name": \n</tool_call>'
    session, key = proxy.open(member)
    message = Client(proxy.url, key).message([user("hi")])
    assert message["content"] == '{"name":'
    assert "tool_calls" not in message
    assert proxy.status(session).engine_failures == 0


def test_half_a_surrogate_pair_in_a_tool_call_is_given_as_the_model_wrote_it(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "a\\ud800b \\ud83d\\ude00"}}\n</tool_call>'
    session, key = proxy.open(member)
    client = Client(proxy.url, key)
    message = client.message([user("hi")])
    assert message["tool_calls"][0]["function"]["arguments"] == '{"cmd": "a\\ud800b \\ud83d\\ude00"}'
    client.message([user("hi"), message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}])
    assert [call.parent for call in proxy.calls(session).calls] == [None, 0]


def test_another_user_message_extends_the_recorded_tokens_too(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: "<think>\nhm\n</think>\n\nyes"
    session, key = proxy.open(member)
    client = Client(proxy.url, key)
    message = client.message([user("one")])
    assert message["reasoning_content"] == "hm"
    client.message([user("one"), {"role": "assistant", "content": "yes"}, user("two")])
    assert [call.parent for call in proxy.calls(session).calls] == [None, 0]


def test_an_unfinished_thought_starts_a_segment_and_says_why(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: "<think>\nhm"
    session, key = proxy.open(member)
    client = Client(proxy.url, key)
    client.message([user("one")])
    client.message([user("one"), {"role": "assistant", "content": ""}, user("two")])
    assert [call.segment_reason for call in proxy.calls(session).calls] == [SegmentReason.FIRST, SegmentReason.REWRITE]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 100_000, b'{"input": "\xff"}'], ids=range(5))
def test_a_malformed_body_is_a_400(proxy: Proxy, stub: StubEngine, member: int, body: bytes) -> None:
    _, key = proxy.open(member)
    reply = httpx.post(f"{proxy.url}/v1/responses", headers={"authorization": f"Bearer {key}"}, content=body)
    assert reply.status_code == 400


def test_many_sessions_at_once_are_kept_apart(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda prompt: "secret of " + prompt.rpartition("I am ")[2].partition("<")[0]
    sessions = [proxy.open(member + 1_000_000 + number) for number in range(24)]

    def run(number: int) -> str:
        return str(Client(proxy.url, sessions[number][1]).message([user(f"I am {number}")])["content"])

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(run, range(24)))
    assert answers == [f"secret of {number}" for number in range(24)]
    assert all(proxy.status(session).calls == 1 for session, _ in sessions)
