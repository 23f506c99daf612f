"""Google's own client against the proxy: what it takes, harnesses take."""

from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from contracts.sessions import Sampling
from tests.proxy.clients import TOOL, thoughtful_agent
from tests.support.proxy import Proxy
from tests.support.stub_engine import StubEngine

PARAMETERS: Any = TOOL["function"]["parameters"]  # type: ignore[index]
RUN = types.FunctionDeclaration(name="exec_command", description="Runs a command.", parameters_json_schema=PARAMETERS)
CONFIG = types.GenerateContentConfig(
    system_instruction="You are an agent.",
    tools=[types.Tool(function_declarations=[RUN])],
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
)


def client(proxy: Proxy, key: str) -> genai.Client:
    return genai.Client(api_key=key, vertexai=False, http_options=types.HttpOptions(base_url=proxy.url))


@pytest.mark.parametrize("streamed", [True, False])
def test_a_conversation_with_tools_is_one_segment(proxy: Proxy, stub: StubEngine, member: int, streamed: bool) -> None:
    stub.script = thoughtful_agent
    session, key = proxy.open(member, sampling=Sampling(temperature=1.0, max_tokens=200))
    google = client(proxy, key)
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="Go.")])]
    while True:
        parts: list[types.Part] = []
        if streamed:
            for chunk in google.models.generate_content_stream(model="policy", contents=contents, config=CONFIG):
                parts += (chunk.candidates[0].content.parts or []) if chunk.candidates and chunk.candidates[0].content else []
                reply = chunk
        else:
            reply = google.models.generate_content(model="policy", contents=contents, config=CONFIG)
            assert reply.candidates
            assert reply.candidates[0].content
            parts = reply.candidates[0].content.parts or []
        contents.append(types.Content(role="model", parts=parts))
        calls = [part.function_call for part in parts if part.function_call]
        if not calls:
            break
        answers = [types.FunctionResponse(id=call.id, name=call.name, response={"output": "ok"}) for call in calls]
        contents.append(types.Content(role="user", parts=[types.Part(function_response=answer) for answer in answers]))
    assert "".join(part.text or "" for part in parts) == "done"
    recorded = proxy.calls(session).calls
    assert [call.parent for call in recorded] == [None, 0, 1]
    assert {(call.segment, call.dialect) for call in recorded} == {(0, "gemini")}
    assert [call.prompt_ids for call in recorded] == stub.prompts
    assert reply.usage_metadata
    assert reply.usage_metadata.prompt_token_count == len(recorded[-1].prompt_ids)


def test_tokens_are_counted_without_a_call(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: "hello"
    session, key = proxy.open(member)
    google = client(proxy, key)
    counted = google.models.count_tokens(model="policy", contents="How long is this?")
    assert proxy.calls(session).calls == []
    reply = google.models.generate_content(model="policy", contents="How long is this?")
    assert reply.usage_metadata
    assert counted.total_tokens == reply.usage_metadata.prompt_token_count


def test_errors_are_the_ones_that_the_client_knows(proxy: Proxy, member: int) -> None:
    stranger = client(proxy, "of-x-y")
    with pytest.raises(errors.ClientError, match="UNAUTHENTICATED"):
        stranger.models.generate_content(model="policy", contents="hi")
    _, key = proxy.open(member)
    google = client(proxy, key)
    with pytest.raises(errors.ClientError, match=r"INVALID_ARGUMENT.*stopSequences"):
        google.models.generate_content(model="policy", contents="hi", config=types.GenerateContentConfig(stop_sequences=[""]))
