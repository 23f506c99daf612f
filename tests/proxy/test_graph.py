"""The forest of calls, over any session tree and any echo a harness may make of an answer."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from contracts.sessions import CallKind, CallRecord, CallTimings, SegmentReason
from proxy.canonical import Message, Question, message_key, message_keys
from proxy.graph import Call, Graph

TEXT = st.text(max_size=12)
ARGUMENTS = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.one_of(st.integers(), TEXT, st.booleans()), max_size=3)
TOOLS = [{"type": "function", "function": {"name": "run", "description": "", "parameters": {}}}]


def assistant(text: str, calls: list[dict[str, Any]], first_id: int = 0) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": f"call{first_id + index}", "type": "function", "function": {"name": "run", "arguments": json.dumps(arguments)}}
            for index, arguments in enumerate(calls)
        ]
    return message


ANSWERS = st.builds(assistant, TEXT, st.lists(ARGUMENTS, max_size=3))


def echoes(message: Message) -> st.SearchStrategy[Message]:
    """What harnesses make of an answer when they send it back."""

    def change(reserialise: bool, reasoning: str | None, underscore: bool, rename: bool, newline: bool) -> Message:
        echo = {key: value for key, value in message.items() if key != "reasoning_content"}
        if reasoning is not None:
            echo["reasoning_content"] = reasoning
        if newline:
            echo["content"] += "\n"
        if calls := message.get("tool_calls"):
            echo["tool_calls"] = [
                {
                    **call,
                    "id": call["id"].replace("call", "call_") if underscore else f"call_{call['id']}_fc_1cf0" if rename else call["id"],
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=1, sort_keys=True)
                        if reserialise
                        else call["function"]["arguments"],
                    },
                }
                for call in calls
            ]
        return echo

    return st.builds(change, st.booleans(), st.none() | TEXT, st.booleans(), st.booleans(), st.booleans())


def ask(graph: Graph, question: Question, answer: Message) -> Call:
    """Record a call for `question`, as `proxy.generation` does."""
    place = graph.place(question)
    segment, reason = graph.segment_for(place)
    sequence = len(graph.calls)
    record = CallRecord(
        session_id="s",
        sequence=sequence,
        parent=place.parent.record.sequence if place.parent else None,
        segment=segment,
        segment_reason=reason,
        kind=place.kind,
        dialect="chat",
        engine="e",
        messages=place.new_messages,
        tools=[] if place.parent else question.tools,
        answer=answer,
        prompt_ids=[1000 + sequence],
        response_ids=[2000 + sequence],
        logprobs=[-1.0],
        versions=[],
        finish_reason="stop",
        timings=CallTimings(arrived=0, waited=0, first_token=0, total=0),
    )
    call = Call(record, question.digest, question.terms, question.window, None, place.parent)
    graph.add(call)
    return call


def chat(messages: list[Message], tools: Any = TOOLS, **fields: Any) -> Question:
    return Question(dialect="chat", model="m", messages=messages, tools=tools, **fields)


@given(st.lists(ANSWERS, min_size=1, max_size=6), st.data())
def test_a_linear_session_is_one_segment_whatever_the_harness_does_to_the_echo(answers: list[Message], data: st.DataObject) -> None:
    graph, history = Graph(), [{"role": "system", "content": "s"}, {"role": "user", "content": "task"}]
    for number, answer in enumerate(answers):
        asked = history
        ask(graph, chat(asked), answer)
        echo = data.draw(echoes(answer))
        outputs = [{"role": "tool", "tool_call_id": call["id"], "content": "out"} for call in echo.get("tool_calls", [])]
        history = [*history, echo, *outputs, {"role": "user", "content": f"observation {number}"}]
    calls = list(graph.calls.values())
    assert {call.record.segment for call in calls} == {0}
    assert [call.record.parent for call in calls] == [None, *range(len(calls) - 1)]
    ids = [identity for number in range(len(calls)) for identity in (1000 + number, 2000 + number)]
    assert calls[-1].full.prompt_ids == ids[:-1]
    assert message_keys(calls[-1].full.messages) == chat(asked).keys
    assert calls[-1].full.tools == TOOLS


@given(ANSWERS, ANSWERS)
def test_an_answer_that_was_not_given_is_a_rewritten_history(given_answer: Message, echoed: Message) -> None:
    graph = Graph()
    task = [{"role": "user", "content": "task"}]
    ask(graph, chat(task), given_answer)
    place = graph.place(chat([*task, echoed, {"role": "user", "content": "next"}]))
    same = message_key(given_answer) == message_key(echoed)
    assert (place.parent is not None) == same
    if not same:
        assert place.reason is SegmentReason.REWRITE


def test_another_list_of_tools_starts_a_segment_and_says_so() -> None:
    graph, task, answer = Graph(), [{"role": "user", "content": "task"}], assistant("a", [])
    ask(graph, chat(task), answer)
    place = graph.place(chat([*task, answer, {"role": "user", "content": "next"}], tools=[*TOOLS, *TOOLS]))
    assert (place.parent, place.reason) == (None, SegmentReason.TOOLS_CHANGED)


def test_two_continuations_of_one_answer_are_two_segments() -> None:
    graph, task, answer = Graph(), [{"role": "user", "content": "task"}], assistant("a", [])
    ask(graph, chat(task), answer)
    calls = [ask(graph, chat([*task, answer, {"role": "user", "content": text}]), answer) for text in ("one", "two")]
    assert [call.record.segment for call in calls] == [0, 1]
    assert [call.record.parent for call in calls] == [0, 0]


def test_a_compacted_history_is_labelled() -> None:
    graph = Graph()
    ask(graph, chat([{"role": "user", "content": "task"}]), assistant("a", []))
    summary = [{"role": "user", "content": "task"}, {"role": "user", "content": "summary"}]
    assert graph.place(chat(summary, window=1)).reason is SegmentReason.COMPACTION


def test_a_helper_call_is_kept_apart_from_the_task() -> None:
    graph = Graph()
    ask(graph, chat([{"role": "system", "content": "agent"}, {"role": "user", "content": "task"}]), assistant("a", []))
    title = [{"role": "system", "content": "Make a title."}, {"role": "user", "content": "task"}]
    place = graph.place(chat(title, tools=[]))
    assert (place.kind, place.reason) == (CallKind.SIDE_CALL, SegmentReason.SIDE_CALL)


def test_a_question_is_a_repeat_until_the_harness_has_gone_on_from_its_answer() -> None:
    graph, task, answer = Graph(), [{"role": "user", "content": "task"}], assistant("a", [])
    call = ask(graph, chat(task), answer)
    assert graph.asked_before(chat(task, stream=True)) is call
    assert graph.asked_before(chat(task, max_tokens=7)) is None
    ask(graph, chat([*task, answer, {"role": "user", "content": "next"}]), answer)
    assert graph.asked_before(chat(task)) is None
