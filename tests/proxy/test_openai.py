"""OpenAI's own client against the proxy: what it takes, harnesses take."""

from typing import Any

import openai
import pytest

from contracts.failures import Limit
from contracts.sessions import CallKind, Sampling, SegmentReason, SessionLimits
from proxy.dialects.responses_input import SUMMARISE
from tests.proxy.clients import FLAT_TOOL, TOOL, text_of_call, thoughtful_agent, user
from tests.support.proxy import Proxy
from tests.support.stub_engine import StubEngine


def client(proxy: Proxy, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=key, max_retries=0)


def check(proxy: Proxy, stub: StubEngine, session: str, dialect: str) -> None:
    """One segment of three calls, each of which extends the one before by its recorded tokens."""
    recorded = proxy.calls(session).calls
    assert [call.parent for call in recorded] == [None, 0, 1]
    assert {(call.segment, call.dialect) for call in recorded} == {(0, dialect)}
    assert [call.prompt_ids for call in recorded] == stub.prompts


@pytest.mark.parametrize("streamed", [True, False])
def test_a_conversation_by_chat_completions_is_one_segment(proxy: Proxy, stub: StubEngine, member: int, streamed: bool) -> None:
    stub.script = thoughtful_agent
    session, key = proxy.open(member, sampling=Sampling(temperature=1.0, max_tokens=200))
    openai_client = client(proxy, key)
    messages: list[Any] = [user("Go.")]
    while True:
        ask: dict[str, Any] = {"model": "policy", "messages": messages, "tools": [TOOL]}
        if streamed:
            with openai_client.chat.completions.stream(**ask) as stream:
                choice = stream.get_final_completion().choices[0]
        else:
            choice = openai_client.chat.completions.create(**ask).choices[0]
        messages.append(choice.message)
        if not choice.message.tool_calls:
            break
        assert choice.finish_reason == "tool_calls"
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in choice.message.tool_calls]
    assert (choice.finish_reason, choice.message.content) == ("stop", "done")
    check(proxy, stub, session, "chat")


@pytest.mark.parametrize("streamed", [True, False])
def test_a_conversation_by_responses_is_one_segment(proxy: Proxy, stub: StubEngine, member: int, streamed: bool) -> None:
    stub.script = thoughtful_agent
    session, key = proxy.open(member, sampling=Sampling(temperature=1.0, max_tokens=200))
    openai_client = client(proxy, key)
    items: list[Any] = [user("Go.")]
    while True:
        ask: dict[str, Any] = {"model": "policy", "input": items, "tools": [{**FLAT_TOOL, "strict": False}]}
        if streamed:
            with openai_client.responses.stream(**ask) as stream:
                reply: Any = stream.get_final_response()
        else:
            reply = openai_client.responses.create(**ask)
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            break
        assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]
    assert (reply.status, reply.output_text) == ("completed", "done")
    check(proxy, stub, session, "responses")


def test_errors_are_the_ones_that_the_client_knows(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: "x"
    with pytest.raises(openai.AuthenticationError, match="not one of an open session"):
        client(proxy, "of-x-y").chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    session, key = proxy.open(member, limits=SessionLimits(calls=1, tokens=1000))
    ask = client(proxy, key)
    with pytest.raises(openai.BadRequestError, match="n is not supported"):
        ask.chat.completions.create(model="policy", n=2, messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="the context window of this model") as caught:
        ask.responses.create(model="policy", input="many words " * 20_000)
    assert caught.value.code == "context_length_exceeded"
    assert proxy.close(session).limit_reached is Limit.CONTEXT
    assert [model.id for model in client(proxy, proxy.open(member + 500_000)[1]).models.list()] == ["policy"]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_conversation_with_a_custom_tool_is_one_segment(proxy: Proxy, stub: StubEngine, member: int, streamed: bool) -> None:
    stub.script = lambda prompt: "done" if "<tool_response>" in prompt else "I add." + text_of_call("python", input="print(1 + 1)")
    session, key = proxy.open(member)
    openai_client = client(proxy, key)
    tool = {"type": "custom", "name": "python", "description": "Runs Python.", "format": {"type": "text"}}
    items: list[Any] = [user("Go.")]
    replies: list[Any] = []
    while not replies or replies[-1].output_text != "done":
        ask: dict[str, Any] = {"model": "policy", "input": items, "tools": [tool]}
        if streamed:
            with openai_client.responses.stream(**ask) as stream:
                replies.append(stream.get_final_response())
        else:
            replies.append(openai_client.responses.create(**ask))
        items += [item.model_dump(exclude_none=True) for item in replies[-1].output]
        calls = [item for item in replies[-1].output if item.type == "custom_tool_call"]
        items += [{"type": "custom_tool_call_output", "call_id": call.call_id, "output": "2"} for call in calls]
    assert [item.type for item in replies[0].output] == ["message", "custom_tool_call"]
    assert (replies[0].output[1].name, replies[0].output[1].input) == ("python", "print(1 + 1)")
    assert [call.parent for call in proxy.calls(session).calls] == [None, 0]
    assert [call.prompt_ids for call in proxy.calls(session).calls] == stub.prompts


def test_a_conversation_is_compacted_and_goes_on(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda prompt: "They said hello." if SUMMARISE in prompt else "hello"
    session, key = proxy.open(member)
    openai_client = client(proxy, key)
    first = openai_client.responses.create(model="policy", input=[user("hi")])
    items: list[Any] = [user("hi"), *[item.model_dump(exclude_none=True) for item in first.output]]
    compacted = openai_client.responses.compact(model="policy", input=items)
    assert (compacted.object, [item.type for item in compacted.output]) == ("response.compaction", ["message", "compaction"])
    assert compacted.usage.total_tokens == compacted.usage.input_tokens + compacted.usage.output_tokens
    kept: list[Any] = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
    openai_client.responses.create(model="policy", input=[*kept, user("go on")])
    calls = proxy.calls(session).calls
    assert [call.kind for call in calls] == [CallKind.TURN, CallKind.COMPACTION, CallKind.TURN]
    assert calls[2].segment_reason is SegmentReason.COMPACTION
    assert [message["content"].rpartition("\n\n")[2] for message in calls[2].messages] == ["hi", "They said hello.", "go on"]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_raw_prompt_goes_to_the_model_as_it_is_and_is_gone_on_from_token_by_token(
    proxy: Proxy, stub: StubEngine, member: int, streamed: bool
) -> None:
    said = "<think>one</think> two <tool_call>three four five six seven eight"
    stub.script = lambda _: said
    session, key = proxy.open(member)
    ask = client(proxy, key).completions

    def complete(prompt: str | list[int], **fields: Any) -> tuple[str, str | None, int]:
        if not streamed:
            whole = ask.create(model="policy", prompt=prompt, **fields)
            assert whole.usage is not None
            return whole.choices[0].text, whole.choices[0].finish_reason, whole.usage.completion_tokens
        chunks = list(ask.create(model="policy", prompt=prompt, stream=True, stream_options={"include_usage": True}, **fields))
        choices = [choice for chunk in chunks for choice in chunk.choices]
        usage = chunks[-1].usage
        assert usage is not None
        return "".join(choice.text for choice in choices), choices[-1].finish_reason, usage.completion_tokens

    text, reason, _ = complete("Count: ", max_tokens=200)
    assert (text, reason) == (said, "stop")
    assert stub.prompts == [stub.tokenizer.encode("Count: ").ids]
    assert complete("Count: ")[1:] == ("length", 16), "another question, with OpenAI's default"
    (first, second) = proxy.calls(session).calls
    complete([*first.prompt_ids, *first.response_ids, 5, 6], max_tokens=200)
    complete([*first.prompt_ids, *first.response_ids[:4], 5], max_tokens=200)
    calls = proxy.calls(session).calls
    assert [call.prompt_ids for call in calls] == stub.prompts
    assert [(call.parent, call.segment) for call in calls] == [(None, 0), (None, 1), (0, 0), (None, 2)]
    assert {(call.kind, call.dialect) for call in calls} == {(CallKind.TURN, "completions")}
    assert calls[2].messages == [{"role": "prompt", "content": "Count: "}, first.answer, {"role": "prompt", "content": [5, 6]}]
    assert second.answer["content"] == text[: len(second.answer["content"])]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": ["a", "b"]}, "2 prompts"),
        ({"prompt": [[1], [2]]}, "2 prompts"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**9]}, "token 1000000000"),
        ({"echo": True}, "echo"),
        ({"n": 2}, "n is not"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 1}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_a_completion_cannot_honour_is_refused_by_name(
    proxy: Proxy, stub: StubEngine, member: int, fields: dict[str, Any], named: str
) -> None:
    _, key = proxy.open(member)
    with pytest.raises(openai.BadRequestError, match=named):
        client(proxy, key).completions.create(**{"model": "policy", "prompt": "hi", **fields})
    assert stub.prompts == []


def test_one_prompt_in_a_list_is_that_prompt(proxy: Proxy, stub: StubEngine, member: int) -> None:
    _, key = proxy.open(member)
    prompts: list[Any] = ["hi", ["hi"], stub.tokenizer.encode("hi").ids, [stub.tokenizer.encode("hi").ids]]
    for prompt in prompts:
        client(proxy, key).completions.create(model="policy", prompt=prompt)
    assert len(stub.prompts) == 2, "the two texts are one question, the two lists of ids another"
    assert stub.prompts[0] == stub.prompts[1]
