"""Anthropic's own client against the proxy: what it takes, harnesses take."""

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam

from contracts.failures import Limit
from contracts.sessions import Sampling, SessionLimits
from tests.proxy.clients import TOOL, thoughtful_agent
from tests.support.proxy import Proxy
from tests.support.stub_engine import StubEngine

RUN: ToolParam = {"name": "exec_command", "description": "Runs a command.", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]


def client(proxy: Proxy, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=proxy.url, api_key=key, max_retries=0)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_conversation_with_tools_is_one_segment(proxy: Proxy, stub: StubEngine, member: int, streamed: bool) -> None:
    stub.script = thoughtful_agent
    session, key = proxy.open(member, sampling=Sampling(temperature=1.0, max_tokens=200))
    messages: list[MessageParam] = [{"role": "user", "content": "Go."}]
    while True:
        ask = {"model": "policy", "max_tokens": 200, "system": "You are an agent.", "messages": messages, "tools": [RUN]}
        if streamed:
            with client(proxy, key).messages.stream(**ask) as stream:  # type: ignore[arg-type]
                reply = stream.get_final_message()
        else:
            reply = client(proxy, key).messages.create(**ask)  # type: ignore[call-overload]
        messages.append({"role": "assistant", "content": reply.content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            break
        assert reply.stop_reason == "tool_use"
        assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
        messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"} for call in calls]})
    assert (reply.stop_reason, [block.type for block in reply.content]) == ("end_turn", ["text"])
    recorded = proxy.calls(session).calls
    assert [call.parent for call in recorded] == [None, 0, 1]
    assert {(call.segment, call.dialect) for call in recorded} == {(0, "messages")}
    assert [call.prompt_ids for call in recorded] == stub.prompts
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(recorded[-1].prompt_ids), len(recorded[-1].response_ids))


def test_tokens_are_counted_without_a_call(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: "hello"
    session, key = proxy.open(member)
    messages: list[MessageParam] = [{"role": "user", "content": "How long is this?"}]
    counted = client(proxy, key).messages.count_tokens(model="policy", messages=messages, tools=[RUN])
    assert proxy.calls(session).calls == []
    reply = client(proxy, key).messages.create(model="policy", max_tokens=8, messages=messages, tools=[RUN])
    assert counted.input_tokens == reply.usage.input_tokens


def test_errors_are_the_ones_that_the_client_knows(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: "x"
    with pytest.raises(anthropic.AuthenticationError, match="not one of an open session"):
        client(proxy, "of-x-y").messages.create(model="policy", max_tokens=8, messages=[{"role": "user", "content": "hi"}])
    session, key = proxy.open(member, limits=SessionLimits(calls=1, tokens=1000))
    ask = client(proxy, key)
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        ask.messages.create(model="policy", max_tokens=8, stop_sequences=[""], messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask.messages.create(model="policy", max_tokens=8, messages=[{"role": "user", "content": "many words " * 20_000}])
    assert proxy.close(session).limit_reached is Limit.CONTEXT
