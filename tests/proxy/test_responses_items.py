"""Items of `/v1/responses` beyond messages and functions: custom tools, tool search, agents' messages, compactions."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from contracts.sessions import CallKind
from proxy.canonical import Answer, Message, message_key
from proxy.dialects.responses import Compact, Responses
from proxy.dialects.responses_input import SUMMARISE, custom_input, growing_input
from proxy.errors import BadRequestError
from tests.proxy.clients import FLAT_TOOL, events, user
from tests.proxy.test_dialects import JSON
from tests.support.processes import ROOT

EXEC = {
    "type": "custom",
    "name": "exec",
    "description": "Runs it.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}}
TOOLS = [FLAT_TOOL, EXEC, SEARCH, {"type": "namespace", "name": "functions", "description": "", "tools": [EXEC, FLAT_TOOL]}]
NAMES = ["exec_command", "exec", "tool_search", "functions__exec", "functions__exec_command"]


def answer_of(*calls: tuple[str, str], content: str = "", finish_reason: str = "stop") -> Answer:
    made = [
        {"id": f"call{index}", "type": "function", "function": {"name": name, "arguments": text}}
        for index, (name, text) in enumerate(calls)
    ]
    message: Message = {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})}
    return Answer("s", 3, message, finish_reason, prompt_tokens=5, response_tokens=7, created=1)


def ask(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": [user("hi"), *items], "tools": TOOLS, **fields}


def test_a_custom_tool_is_a_function_of_one_string_that_is_told_its_grammar() -> None:
    tools = {tool["function"]["name"]: tool["function"] for tool in Responses().parse(ask(), {}).tools}
    assert list(tools) == NAMES
    assert tools["exec"]["description"] == "Runs it.\n\nIts input follows this lark grammar:\nstart: X"
    assert tools["exec"]["parameters"]["required"] == ["input"]
    assert tools["tool_search"]["parameters"] == {"type": "object"}


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"input": "text(\\"a\\")"}', 'text("a")'),
        ('{"input": ""}', ""),
        ('{"input": 3}', '{"input": 3}'),
        ('{"input": "a", "more": 1}', '{"input": "a", "more": 1}'),
        ('{"code": "a"}', '{"code": "a"}'),
        ('"a"', '"a"'),
        ("text(1)", "text(1)"),
    ],
)
def test_a_custom_tool_gets_its_input_or_all_that_was_written_in_its_place(arguments: str, given: str) -> None:
    question = Responses().parse(ask(), {})
    (item,) = Responses().encode(question, answer_of(("functions__exec", arguments)))["output"]
    assert item == {
        "type": "custom_tool_call",
        "id": item["id"],
        "call_id": "call0",
        "status": "completed",
        "name": "exec",
        "namespace": "functions",
        "input": given,
    }


ARGUMENTS = st.text(max_size=12) | JSON.map(json.dumps) | JSON.map(lambda value: json.dumps({"input": value}))


@given(st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3))
def test_whatever_is_called_with_whatever_arguments_comes_back_as_the_same_message(calls: list[tuple[str, str]]) -> None:
    question, answer = Responses().parse(ask(), {}), answer_of(*calls)
    output = json.loads(json.dumps(Responses().encode(question, answer)["output"]))
    echo = Responses().parse(ask(*output), {})
    assert len(echo.messages) == 2
    assert message_key(echo.messages[1]) == message_key(answer.message)


def test_events_of_a_custom_call_and_of_a_search() -> None:
    question = Responses().parse(ask(stream=True), {})
    answer = answer_of(("exec", '{"input": "go"}'), ("tool_search", '{"query": "q"}'))
    stream = Responses().stream(question, answer.identity, 1)
    seen = events((stream.start() + stream.end(answer)).decode())[2:]
    custom, search = seen[-1]["response"]["output"]
    assert [(event["type"], event.get("delta", event.get("input"))) for event in seen[:-1]] == [
        ("response.output_item.added", None),
        ("response.custom_tool_call_input.delta", "go"),
        ("response.custom_tool_call_input.done", "go"),
        ("response.output_item.done", None),
        ("response.output_item.added", None),
        ("response.output_item.done", None),
    ]
    assert seen[0]["item"] == {**custom, "input": "", "status": "in_progress"}
    assert {event["item_id"] for event in seen if "item_id" in event} == {custom["id"]}
    assert (search["type"], search["execution"], search["arguments"]) == ("tool_search_call", "client", {"query": "q"})
    assert [event["item"] for event in seen if event["type"] == "response.output_item.done"] == [custom, search]


def test_found_tools_are_text_where_they_were_found_and_can_be_called() -> None:
    found = {"type": "namespace", "name": "agents", "tools": [{**FLAT_TOOL, "name": "spawn", "defer_loading": True}]}
    call = {"type": "tool_search_call", "call_id": "call1", "execution": "client", "arguments": {"query": "q"}}
    output = {"type": "tool_search_output", "call_id": "call1", "execution": "client", "tools": [found]}
    question = Responses().parse(ask(call, output), {})
    assert question.tools_key == Responses().parse(ask(), {}).tools_key
    (tool,) = json.loads(question.messages[-1]["content"])
    assert (question.messages[-1]["role"], tool["function"]["name"]) == ("tool", "agents__spawn")
    (item,) = Responses().encode(question, answer_of(("agents__spawn", "{}")))["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "spawn")


def test_tools_that_come_as_an_item_are_the_requests_tools() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": TOOLS}
    assert Responses().parse({"input": [item, user("hi")]}, {}).digest == Responses().parse(ask(), {}).digest
    assert Responses().parse({"input": [item, user("hi")], "tool_choice": "none"}, {}).tools == []


def test_what_one_agent_tells_another_is_a_users_message() -> None:
    parts = [{"type": "input_text", "text": "Sender: /root\n"}, {"type": "encrypted_content", "encrypted_content": "Look at a.txt"}]
    item = {"type": "agent_message", "author": "/root", "recipient": "/root/helper", "content": parts}
    assert Responses().parse(ask(item), {}).messages[-1] == user("Sender: /root\nLook at a.txt")


def test_an_update_of_effort_or_verbosity_changes_nothing() -> None:
    item = {"type": "configuration_update", "reasoning": {"effort": "high"}}
    assert Responses().parse(ask(item), {}).digest == Responses().parse(ask(), {}).digest


@given(st.text(), st.integers(0, 5))
def test_a_compaction_comes_back_as_the_summary_that_it_is(summary: str, window: int) -> None:
    metadata = {"x-codex-turn-metadata": json.dumps({"window_number": window})}
    question = Responses().parse(ask({"type": "compaction_trigger"}, stream=True), metadata)
    assert (question.kind, question.compact, question.messages[-1]) == (CallKind.COMPACTION, True, user(SUMMARISE))
    answer = answer_of(("exec", "{}"), content=summary)
    stream = Responses().stream(question, answer.identity, 1)
    assert stream.show({**answer.message, "reasoning_content": "thought"}) == b""
    done = [event["item"] for event in events(stream.end(answer).decode()) if event["type"] == "response.output_item.done"]
    assert done == Responses().encode(question, answer)["output"]
    (item,) = done
    after = Responses().parse(ask(item), {})
    assert after.messages[-1]["role"] == "user"
    assert after.messages[-1]["content"].endswith(f"\n\n{summary}")
    assert (after.kind, after.window) == (CallKind.TURN, window + 1)


def test_a_compacted_conversation_is_what_the_user_said_and_one_summary() -> None:
    first = Compact().parse(ask({"role": "assistant", "content": "hello"}), {})
    output = Compact().encode(first, answer_of(content="They met."))["output"]
    assert [item["type"] for item in output] == ["message", "compaction"]
    second = Compact().parse({"input": [*output, user("more")]}, {})
    again = Compact().encode(second, answer_of(content="They met again."))["output"]
    assert [item.get("content", [{}])[0].get("text") for item in again] == ["hi", "more", None]
    assert Responses().parse({"input": again}, {}).window == 2


@pytest.mark.parametrize(("field", "value"), [("input", None), ("input", []), ("input", 3), ("stream", True)])
def test_what_cannot_be_compacted_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(BadRequestError, match=field):
        Compact().parse({"model": "m", "input": "hi", field: value}, {})


KINDS = [
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "tool_search_call",
    "tool_search_output", "additional_tools", "agent_message", "compaction", "context_compaction", "compaction_trigger", "item_reference",
]  # fmt: skip
FIELDS = [
    "role", "content", "summary", "call_id", "name", "namespace", "arguments", "input", "output", "tools", "encrypted_content",
]  # fmt: skip


@given(st.lists(st.fixed_dictionaries({"type": st.sampled_from(KINDS)}, optional=dict.fromkeys(FIELDS, JSON | st.text())), max_size=3))
def test_any_item_is_taken_or_refused(items: list[dict[str, Any]]) -> None:
    for dialect in (Responses(), Compact()):
        try:
            assert dialect.parse(ask(*items), {}).digest
        except BadRequestError as error:
            assert "input" in error.message


def test_the_documentation_says_what_becomes_of_every_field_that_openai_has() -> None:
    text = (ROOT / "docs/proxy.md").read_text()
    decided = set(re.findall(r"`(\w+)`", text.partition("| field of the request |")[2].partition("\n## ")[0]))
    fields = {*ResponseCreateParamsBase.__annotations__, "stream"}
    assert fields - decided == set()


@given(st.text(st.characters(codec="utf-8")), st.booleans(), st.data())
def test_what_is_shown_of_a_custom_input_is_how_it_begins(text: str, escaped: bool, data: st.DataObject) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=escaped)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(arguments)), max_size=5)))
    shown = [growing_input(arguments[:cut]) for cut in [*cuts, len(arguments)]]
    assert all(later.startswith(earlier) for earlier, later in zip(shown, shown[1:], strict=False))
    assert shown[-1] == custom_input(arguments) == text
