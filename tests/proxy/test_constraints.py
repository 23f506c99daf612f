"""Answers that must be like something: each dialect's way to say so, and what the engine is asked for."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.canonical import Question
from proxy.constraints import before_stop, hermes, structured_outputs, until_stop
from proxy.dialects.chat import ChatCompletions
from proxy.dialects.gemini import Gemini
from proxy.dialects.messages import Messages
from proxy.dialects.responses import Responses
from proxy.errors import BadRequestError
from tests.proxy.clients import FLAT_TOOL, TOOL, Client, call_text, events, user
from tests.support.proxy import Proxy
from tests.support.stub_engine import StubEngine

MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
FORM = hermes(MARKS.index)
NAME = "exec_command"
OTHER = {"type": "function", "function": {"name": "other", "description": "", "parameters": {}}}
SCHEMA = {"type": "object", "properties": {"port": {"type": "integer"}}, "required": ["port"]}
PARAMETERS = TOOL["function"]["parameters"]  # type: ignore[index]


def chat(**fields: Any) -> Question:
    return ChatCompletions().parse({"messages": [user("hi")], "tools": [TOOL, OTHER], **fields}, {})


def responses(**fields: Any) -> Question:
    return Responses().parse({"input": "hi", "tools": [FLAT_TOOL, {"type": "function", "name": "other"}], **fields}, {})


def messages(**fields: Any) -> Question:
    tools = [{"name": NAME, "input_schema": PARAMETERS}, {"name": "other", "input_schema": {}}]
    return Messages().parse({"messages": [user("hi")], "tools": tools, "max_tokens": 9, **fields}, {})


def gemini(calling: Any = None, **config: Any) -> Question:
    declared = [{"name": NAME, "parametersJsonSchema": PARAMETERS}, {"name": "other"}]
    body: dict[str, Any] = {"contents": [{"parts": [{"text": "hi"}]}], "tools": [{"functionDeclarations": declared}]}
    return Gemini().parse({**body, "toolConfig": {"functionCallingConfig": calling or {}}, "generationConfig": config}, {})


FUNCTION = {"type": "function", "function": {"name": NAME}}


@pytest.mark.parametrize(
    ("question", "names"),
    [
        (chat(), ()),
        (chat(tool_choice="auto"), ()),
        (chat(tool_choice="required"), (NAME, "other")),
        (chat(tool_choice=FUNCTION), (NAME,)),
        (chat(tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [FUNCTION]}}), (NAME,)),
        (responses(tool_choice="required"), (NAME, "other")),
        (responses(tool_choice={"type": "function", "name": NAME}), (NAME,)),
        (responses(tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": NAME}]}), (NAME,)),
        (messages(tool_choice={"type": "any"}), (NAME, "other")),
        (messages(tool_choice={"type": "tool", "name": NAME}), (NAME,)),
        (gemini({"mode": "ANY"}), (NAME, "other")),
        (gemini({"mode": "ANY", "allowedFunctionNames": [NAME]}), (NAME,)),
    ],
)
def test_each_dialect_can_ask_for_a_call(question: Question, names: tuple[str, ...]) -> None:
    assert question.must_call == names


@pytest.mark.parametrize(
    "question",
    [
        chat(parallel_tool_calls=False),
        responses(parallel_tool_calls=False),
        messages(tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
    ],
)
def test_each_dialect_can_ask_for_one_call_at_most(question: Question) -> None:
    assert question.one_call


@pytest.mark.parametrize(
    "question",
    [
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}),
        responses(text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}),
        messages(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}),
        gemini(responseMimeType="application/json", responseJsonSchema=SCHEMA),
        gemini(
            responseMimeType="application/json",
            responseSchema={"type": "OBJECT", "properties": {"port": {"type": "INTEGER"}}, "required": ["port"]},
        ),
    ],
)
def test_each_dialect_can_ask_for_json_of_a_schema(question: Question) -> None:
    assert question.schema == SCHEMA


@pytest.mark.parametrize(
    "question", [chat(stop="END"), chat(stop=["END"]), messages(stop_sequences=["END"]), gemini(stopSequences=["END"])]
)
def test_each_dialect_can_ask_for_an_end(question: Question) -> None:
    assert question.stop == ("END",)


def test_what_is_asked_for_is_part_of_the_question() -> None:
    asked = [
        chat(),
        chat(tool_choice="required"),
        chat(stop="a"),
        chat(parallel_tool_calls=False),
        chat(response_format={"type": "json_object"}),
    ]
    assert len({question.digest for question in asked}) == len(asked)


def form_of(question: Question) -> Any:
    outputs = structured_outputs(question, FORM, 100)
    assert outputs
    return json.loads(outputs["structural_tag"])["format"]["elements"][1]


def test_a_forced_call_is_a_tag_of_each_tool_that_may_be_called() -> None:
    form = form_of(chat(tool_choice=FUNCTION, parallel_tool_calls=False))
    (tag,) = form["tags"]
    opening, arguments, closing = tag["content"]["elements"]
    begin, end = (MARKS[mark["token"]] for mark in (tag["begin"], tag["end"]))
    written = begin + opening["value"] + "{}" + closing["value"] + end
    assert written == '<tool_call>\n{"name": "exec_command", "arguments": {}}\n</tool_call>'
    assert arguments["json_schema"] == PARAMETERS
    assert (form["at_least_one"], form["stop_after_first"]) == (True, True)
    other = form_of(chat(tool_choice="required"))["tags"][1]
    assert other["content"]["elements"][0]["value"].endswith('"other", "arguments": ')


def test_a_thought_before_a_forced_call_has_none_of_the_marks_that_would_end_the_answer() -> None:
    outputs = structured_outputs(chat(tool_choice="required"), FORM, 100)
    assert outputs
    thought = json.loads(outputs["structural_tag"])["format"]["elements"][0]["content"]["elements"][0]
    assert thought["content"]["excludes"] == MARKS
    assert (MARKS[thought["begin"]["token"]], MARKS[thought["end"]["token"]]) == ("<think>", "</think>")
    assert thought["content"]["max_tokens"] == 50


def test_a_schema_beside_tools_leaves_the_choice() -> None:
    form = form_of(chat(response_format={"type": "json_object"}))
    assert [element["type"] for element in form["elements"]] == ["json_schema", "tags_with_separator"]
    assert form_of(chat(tools=[], response_format={"type": "json_object"}))["json_schema"] == {"type": "object"}
    assert structured_outputs(chat(), FORM, 100) is None


def test_a_call_cannot_be_forced_if_its_form_is_not_known() -> None:
    with pytest.raises(BadRequestError, match="tool_choice"):
        structured_outputs(chat(tool_choice="required"), None, 100)


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
def test_nothing_is_shown_that_the_end_takes_back(text: str, stop: list[str]) -> None:
    whole, word = until_stop(text, stop)
    assert not any(end in whole for end in stop)
    assert text.startswith(whole + (word or ""))
    for length in range(len(text) + 1):
        assert whole.startswith(before_stop(text[:length], stop))


def test_an_answer_ends_before_a_stop_text_and_its_tokens_are_kept(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: "one two END three"
    session, key = proxy.open(member)
    client = Client(proxy.url, key)
    body = {"model": "policy", "messages": [user("hi")], "max_tokens": 99, "stop_sequences": ["three", "END"]}
    reply = client.http.post("/v1/messages", json=body).json()
    assert (reply["content"], reply["stop_reason"], reply["stop_sequence"]) == (
        [{"type": "text", "text": "one two "}],
        "stop_sequence",
        "END",
    )
    streamed = events(client.http.post("/v1/messages", json={**body, "stream": True, "messages": [user("again")]}).text)
    texts = [event["delta"]["text"] for event in streamed if event["type"] == "content_block_delta"]
    assert "".join(texts) == "one two "
    first, _ = proxy.calls(session).calls
    assert stub.text(first.response_ids) == "one two END"
    assert stub.params[0]["stop"] == ["three", "END"]
    echo = {"role": "assistant", "content": reply["content"]}
    client.http.post("/v1/messages", json={**body, "messages": [user("hi"), echo, user("go on")]})
    last = proxy.calls(session).calls[-1]
    assert last.prompt_ids[: len(first.prompt_ids) + len(first.response_ids)] == first.prompt_ids + first.response_ids


def test_one_call_ends_the_answer(proxy: Proxy, stub: StubEngine, member: int) -> None:
    _, key = proxy.open(member)
    Client(proxy.url, key).chat([user("hi")], parallel_tool_calls=False)
    assert [stub.text([token]) for token in stub.params[-1]["stop_token_ids"]][-1] == "</tool_call>"
    assert "structured_outputs" not in stub.params[-1]


def test_a_grammar_may_have_the_mark_that_ends_a_call(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: call_text("ls")
    _, key = proxy.open(member)
    Client(proxy.url, key).chat([user("hi")], parallel_tool_calls=False, tool_choice="required")
    assert "</tool_call>" not in [stub.text([token]) for token in stub.params[-1]["stop_token_ids"]]
    assert "structured_outputs" in stub.params[-1]


def test_an_answer_under_a_grammar_is_sampled_anew_when_it_breaks_off(proxy: Proxy, stub: StubEngine, member: int) -> None:
    stub.script = lambda _: call_text("ls")
    stub.troubles += ["abort"]
    session, key = proxy.open(member)
    message = Client(proxy.url, key).message([user("hi")], tool_choice="required")
    assert message["tool_calls"][0]["function"]["name"] == NAME
    (call,) = proxy.calls(session).calls
    assert stub.prompts == [call.prompt_ids, call.prompt_ids]
    assert "structural_tag" in stub.params[-1]["structured_outputs"]
