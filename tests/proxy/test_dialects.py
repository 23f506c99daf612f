"""Wire formats: what is sent out comes back as the same message; what cannot be honoured is refused by name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.canonical import Answer, Message, Question, message_key
from proxy.dialects import DIALECTS
from proxy.dialects.base import Dialect
from proxy.dialects.chat import ChatCompletions
from proxy.dialects.completions import Completions
from proxy.dialects.gemini import Gemini
from proxy.dialects.messages import Messages
from proxy.dialects.responses import Compact, Responses
from proxy.errors import BadRequestError
from tests.proxy.clients import FLAT_TOOL, TOOL, events
from tests.proxy.test_graph import ANSWERS, assistant

NAMESPACE = {"type": "namespace", "name": "mcp__files__", "description": "", "tools": [{**FLAT_TOOL, "name": "read"}]}


def answer_of(message: Message, finish_reason: str = "stop") -> Answer:
    return Answer("s", 3, message, finish_reason, prompt_tokens=5, response_tokens=7, created=1)


def question_in(dialect: Dialect, **fields: Any) -> Question:
    prompts: dict[str, dict[str, Any]] = {
        "responses": {"input": "hi"},
        "gemini": {"contents": [{"parts": [{"text": "hi"}]}]},
        "completions": {"prompt": "hi"},
    }
    streamed = not isinstance(dialect, Compact)
    return dialect.parse({"model": "m", "stream": streamed, **prompts.get(dialect.name, {"messages": [HI]}), **fields}, {})


def grown(message: Message, length: int) -> Message:
    """The message when `length` characters of its content and of its calls' arguments have been sampled."""
    content, calls = message["content"][:length], []
    left = length - len(message["content"])
    for call in message.get("tool_calls", []):
        if left < 0:
            break
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": function["arguments"][:left]}})
        left -= len(function["arguments"])
    return {**message, "content": content, "tool_calls": calls}


def streamed(dialect: Dialect, answer: Answer, cuts: list[int]) -> str:
    """A whole stream whose message was shown as it grew."""
    stream = dialect.stream(question_in(dialect, stream_options={"include_usage": True}), answer.identity, 1)
    text = stream.start()
    for cut in sorted(cuts):
        text += stream.show(grown(answer.message, cut)) + stream.keep_alive()
    return (text + stream.end(answer)).decode()


HI = {"role": "user", "content": "hi"}
CUTS = st.lists(st.integers(0, 60), max_size=6)


@given(ANSWERS)
def test_a_chat_answer_echoed_is_the_same_message(message: Message) -> None:
    dialect = ChatCompletions()
    reply = dialect.encode(question_in(dialect), answer_of(message))
    echo = dialect.parse({"messages": [{"role": "user", "content": "hi"}, reply["choices"][0]["message"]]}, {})
    assert message_key(echo.messages[1]) == message_key(message)


@given(ANSWERS, CUTS)
def test_a_streamed_chat_answer_adds_up_to_the_whole_one(message: Message, cuts: list[int]) -> None:
    dialect = ChatCompletions()
    chunks = events(streamed(dialect, answer_of(message), cuts))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    calls: list[Any] = []
    for call in [call for delta in deltas for call in delta.get("tool_calls", [])]:
        if call["index"] == len(calls):
            calls.append({key: call[key] for key in ("id", "type", "function")})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert calls == message.get("tool_calls", [])
    assert chunks[-1]["usage"]["total_tokens"] == 12


@given(ANSWERS)
def test_a_responses_answer_echoed_is_the_same_message(message: Message) -> None:
    dialect = Responses()
    reply = dialect.encode(question_in(dialect), answer_of({**message, "reasoning_content": "why"}))
    echo = dialect.parse({"input": [{"role": "user", "content": "hi"}, *reply["output"]]}, {})
    assert len(echo.messages) == 2
    assert message_key(echo.messages[1]) == message_key(message)
    assert echo.messages[1]["reasoning_content"] == "why"


@given(ANSWERS, CUTS)
def test_responses_events_come_in_a_valid_order(message: Message, cuts: list[int]) -> None:
    stream = events(streamed(Responses(), answer_of(message), cuts))
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert stream[0]["type"] == "response.created"
    assert stream[-1]["type"] == "response.completed"
    whole = stream[-1]["response"]["output"]
    done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    assert done == whole
    for index, item in enumerate(whole):
        of_item = [event["type"] for event in stream if event.get("output_index") == index]
        assert of_item[0] == "response.output_item.added"
        assert of_item[-1] == "response.output_item.done"
        assert of_item.count("response.output_item.added") == 1
        texts = [event["delta"] for event in stream if event.get("output_index") == index and event["type"].endswith(".delta")]
        assert "".join(texts) == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


@given(ANSWERS)
def test_a_messages_answer_echoed_is_the_same_message(message: Message) -> None:
    dialect = Messages()
    reply = dialect.encode(question_in(dialect), answer_of({**message, "reasoning_content": "why"}))
    echo = dialect.parse({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": reply["content"]}, HI]}, {})
    assert [entry["role"] for entry in echo.messages] == ["user", "assistant", "user"]
    assert message_key(echo.messages[1]) == message_key(message)
    assert echo.messages[1]["reasoning_content"] == "why"


@given(ANSWERS, CUTS)
def test_messages_events_are_blocks_one_after_another_that_add_up_to_the_answer(message: Message, cuts: list[int]) -> None:
    dialect, answer = Messages(), answer_of({**message, "reasoning_content": "why"})
    encoder = dialect.stream(question_in(dialect), answer.identity, 1)
    text = encoder.start() + encoder.show({**grown(message, -1), "content": "", "reasoning_content": "wh"}) + encoder.keep_alive()
    text += b"".join(encoder.show(grown(answer.message, cut)) for cut in sorted(cuts)) + encoder.end(answer)
    stream = [event for event in events(text.decode()) if event["type"] != "ping"]
    assert [stream[0]["type"], stream[-2]["type"], stream[-1]["type"]] == ["message_start", "message_delta", "message_stop"]
    blocks: list[Any] = []
    is_open, arguments = False, ""
    for event in stream[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            is_open, arguments = True, ""
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(arguments)
        elif event["delta"]["type"] == "input_json_delta":
            arguments += event["delta"]["partial_json"]
        else:
            kind = event["delta"]["type"].removesuffix("_delta")
            blocks[-1][kind] += event["delta"][kind]
    assert not is_open
    assert blocks == dialect.encode(question_in(dialect), answer)["content"]


def test_tool_results_and_text_of_one_message_keep_their_order() -> None:
    use = [{"type": "tool_use", "id": f"call{number}", "name": "run", "input": {}} for number in (1, 2)]
    results = [{"type": "tool_result", "tool_use_id": f"call{number}", "content": [{"type": "text", "text": "out"}]} for number in (1, 2)]
    body = {
        "messages": [HI, {"role": "assistant", "content": use}, {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]}]
    }
    messages = Messages().parse(body, {}).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert [message.get("tool_call_id") for message in messages[2:]] == ["call1", "call2", None]


def test_hints_and_forms_of_text_do_not_make_another_question() -> None:
    plain = {"system": "be brief", "messages": [HI], "tools": [{"name": "run", "input_schema": {}}]}
    hint = {"cache_control": {"type": "ephemeral"}}
    dressed = {
        "system": [{"type": "text", "text": "be brief", **hint}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **hint}]}],
        "tools": [{"type": "custom", "name": "run", "input_schema": {}, **hint}],
        "metadata": {"user_id": "someone"},
    }
    assert Messages().parse(plain, {}).digest == Messages().parse(dressed, {}).digest


@given(ANSWERS)
def test_a_gemini_answer_echoed_is_the_same_message(message: Message) -> None:
    dialect = Gemini()
    reply = dialect.encode(question_in(dialect), answer_of({**message, "reasoning_content": "why"}))
    ask = {"role": "user", "parts": [{"text": "hi"}]}
    echo = dialect.parse({"contents": [ask, reply["candidates"][0]["content"], ask]}, {})
    assert [entry["role"] for entry in echo.messages] == ["user", "assistant", "user"]
    assert message_key(echo.messages[1]) == message_key(message)
    assert echo.messages[1]["reasoning_content"] == "why"


@given(ANSWERS, CUTS)
def test_gemini_events_add_up_to_the_answer(message: Message, cuts: list[int]) -> None:
    dialect, answer = Gemini(), answer_of(message, "length")
    stream = events(streamed(dialect, answer, cuts))
    parts = [part for event in stream for part in event["candidates"][0]["content"]["parts"]]
    whole = dialect.encode(question_in(dialect), answer)
    assert "".join(part.get("text", "") for part in parts) == message["content"]
    calls = [part for part in whole["candidates"][0]["content"]["parts"] if "functionCall" in part]
    assert [part for part in parts if "functionCall" in part] == calls
    assert [event["candidates"][0].get("finishReason") for event in stream] == [None] * (len(stream) - 1) + ["MAX_TOKENS"]
    assert stream[-1]["usageMetadata"] == whole["usageMetadata"]


def test_a_functions_answer_in_gemini_is_its_text_or_its_json() -> None:
    answers = [({"output": "a"}, "a"), ({"result": "b"}, "b"), ({"error": "c"}, '{"error": "c"}'), ({"output": 1}, '{"output": 1}')]
    for response, text in answers:
        part = {"functionResponse": {"id": "call1", "name": "run", "response": response}}
        (message,) = Gemini().parse({"contents": [{"role": "user", "parts": [part]}]}, {}).messages
        assert message == {"role": "tool", "content": text, "tool_call_id": "call1"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("contents", []),
        ("contents", [{"role": "narrator", "parts": [{"text": "x"}]}]),
        ("contents", [{"parts": [{"inlineData": {"mimeType": "image/png", "data": ""}}]}]),
        ("contents", [{"role": "model", "parts": [{"functionCall": {"name": 3}}]}]),
        ("toolConfig", {"functionCallingConfig": {"mode": "ANY"}}),
        ("toolConfig", {"functionCallingConfig": {"allowedFunctionNames": ["run"]}}),
        ("tools", [{"googleSearch": {}}]),
        ("cachedContent", "cachedContents/1"),
        ("generationConfig", {"maxOutputTokens": 0}),
        ("generationConfig", {"stopSequences": [""]}),
        ("generationConfig", {"responseMimeType": "text/x.enum"}),
        ("generationConfig", {"responseSchema": {"type": "STRING"}}),
    ],
)
def test_a_gemini_field_that_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadRequestError, match=next(iter(value)) if field == "generationConfig" else field):
        Gemini().parse({"contents": [{"parts": [{"text": "hi"}]}], field: value}, {})


@given(ANSWERS)
def test_nothing_that_a_harness_acts_on_is_sent_before_the_end(message: Message) -> None:
    for dialect in DIALECTS:
        stream = dialect.stream(question_in(dialect), "x", 1)
        shown = (stream.start() + stream.show({**message, "reasoning_content": "thought"}) + stream.keep_alive()).decode()
        assert '"finish_reason":"' not in shown
        assert ".done" not in shown
        assert "tool_search_call" not in shown
        assert "message_delta" not in shown
        assert "functionCall" not in shown
        stops = [event for event in events(shown) if event["type"] == "content_block_stop"] if dialect.name == "messages" else []
        calls = [event for event in events(shown) if "tool_use" in str(event)] if dialect.name == "messages" else []
        assert not calls or len(stops) == 1 + bool(message["content"])


def test_a_call_of_a_namespaced_tool_comes_back_with_its_namespace() -> None:
    dialect = Responses()
    question = question_in(dialect, tools=[FLAT_TOOL, NAMESPACE])
    assert [tool["function"]["name"] for tool in question.tools] == ["exec_command", "mcp__files__read"]
    message = assistant("", [{"path": "a"}])
    message["tool_calls"][0]["function"]["name"] = "mcp__files__read"
    (item,) = dialect.encode(question, answer_of(message))["output"]
    assert (item["namespace"], item["name"]) == ("mcp__files__", "read")
    echo = dialect.parse({"input": [{"role": "user", "content": "hi"}, item], "tools": [FLAT_TOOL, NAMESPACE]}, {})
    assert message_key(echo.messages[1]) == message_key(message)


def test_parallel_calls_and_their_outputs_are_one_answer_and_two_tool_messages() -> None:
    call = {"type": "function_call", "name": "run", "arguments": "{}"}
    output = {"type": "function_call_output", "output": [{"type": "input_text", "text": "out"}]}
    ids = ("call1", "call2")
    items = [{"role": "user", "content": "hi"}, *({**call, "call_id": i} for i in ids), *({**output, "call_id": i} for i in ids)]
    messages = Responses().parse({"input": items}, {}).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["call1", "call2"]


def test_developer_and_system_messages_are_the_same() -> None:
    question = ChatCompletions().parse({"messages": [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}]}, {})
    assert question.messages == [{"role": "system", "content": "be brief"}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("stop", [""]),
        ("stop", 3),
        ("logprobs", True),
        ("response_format", {"type": "grammar"}),
        ("tool_choice", "required"),
        ("tool_choice", "sometimes"),
        ("tool_choice", {"type": "function", "function": {"name": "run"}}),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("messages", []),
        ("messages", "hi"),
        ("messages", [{"role": "narrator", "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("messages", [3]),
        ("tools", [{"type": "web_search"}]),
        ("tools", [{"type": "function", "function": {"name": 3}}]),
    ],
)
def test_a_chat_field_that_cannot_be_honoured_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(BadRequestError, match=field):
        ChatCompletions().parse({"messages": [{"role": "user", "content": "hi"}], field: value}, {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("tool_choice", {"type": "function", "name": "run"}),
        ("background", True),
        ("input", []),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]),
        ("input", [{"type": "function_call", "call_id": 3, "name": "x", "arguments": "{}"}]),
        ("input", [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]),
        ("input", [{"type": "local_shell_call", "call_id": "c", "action": {}}]),
        ("input", [{"type": "image_generation_call", "id": "ig_1", "result": ""}]),
        ("input", [{"type": "compaction", "encrypted_content": "gAAAAABo"}]),
        ("input", [{"type": "context_compaction"}]),
        ("input", [{"type": "compaction_trigger"}, {"role": "user", "content": "hi"}]),
        ("input", [{"type": "custom_tool_call", "call_id": "c", "name": "exec", "input": {}}]),
        ("input", [{"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {}}]),
        ("input", [{"type": "additional_tools", "role": "developer", "tools": [{"type": "mcp"}]}]),
        ("tools", [{"type": "custom", "name": "apply_patch", "format": {"type": "audio"}}]),
        ("tools", [{"type": "custom", "format": {"type": "text"}}]),
        ("tools", [{"type": "tool_search"}]),
        ("tools", [{"type": "web_search"}]),
        ("tools", [{"type": "local_shell"}]),
        ("tools", [{**FLAT_TOOL, "name": "a__b"}, {**NAMESPACE, "name": "a", "tools": [{**FLAT_TOOL, "name": "b"}]}]),
        ("tools", [{**NAMESPACE, "tools": [NAMESPACE]}]),
        ("include", ["message.output_text.logprobs"]),
        ("context_management", [{"type": "compaction", "compact_threshold": 1000}]),
        ("moderation", {"model": "omni-moderation-latest"}),
        ("max_output_tokens", -1),
        ("text", {"format": {"type": "grammar"}}),
    ],
)
def test_a_responses_field_that_cannot_be_honoured_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(BadRequestError, match="format" if field == "text" else field):
        Responses().parse({"input": "hi", field: value}, {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_sequences", [3]),
        ("tool_choice", {"type": "any"}),
        ("tool_choice", {"type": "tool", "name": "run"}),
        ("tool_choice", {"type": "some"}),
        ("tool_choice", "auto"),
        ("max_tokens", 0),
        ("messages", []),
        ("messages", [HI, {"role": "assistant", "content": "The answer is"}]),
        ("messages", [{"role": "narrator", "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]),
        ("messages", [{"role": "assistant", "content": [{"type": "tool_use", "id": "call1", "name": "run", "input": "x"}]}, HI]),
        ("system", 3),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
        ("mcp_servers", [{"url": "http://x"}]),
        ("output_config", {"format": {"type": "json_schema"}}),
        ("output_config", {"format": {"type": "xml"}}),
    ],
)
def test_a_messages_field_that_cannot_be_honoured_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(BadRequestError, match="format" if field == "output_config" else field):
        Messages().parse({"messages": [HI], field: value}, {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["type", "role", "content", "text", "tool_use", "tool_use_id", "input", "thinking", "tool_calls", "function", "name", "arguments",
         "id", "call_id", "output", "tools", "parts", "functionCall", "functionResponse", "response", "args", "format", "namespace",
         "custom", "custom_tool_call", "tool_search", "tool_search_output", "additional_tools", "compaction", "encrypted_content"]
    ), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "messages",
                "input",
                "tools",
                "stream_options",
                "text",
                "model",
                "instructions",
                "system",
                "tool_choice",
                "output_config",
                "contents",
                "systemInstruction",
                "generationConfig",
                "toolConfig",
                "include",
                "prompt",
            ]
        ),
        JSON,
    )
)
def test_any_body_is_parsed_or_refused(body: dict[str, Any]) -> None:
    for dialect in DIALECTS:
        try:
            assert dialect.parse(body, {}).digest
        except BadRequestError as error:
            assert error.message


@given(st.text() | JSON.map(json.dumps))
def test_codex_metadata_of_any_form_is_harmless(metadata: str) -> None:
    assert Responses().parse({"input": "hi", "tools": [FLAT_TOOL]}, {"x-codex-turn-metadata": metadata}).window >= 0
    assert ChatCompletions().parse({"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}, {}).tools == [TOOL]


@given(st.text(max_size=12), CUTS)
def test_a_streamed_completion_adds_up_to_the_whole_one(text: str, cuts: list[int]) -> None:
    dialect, answer = Completions(), answer_of({"role": "assistant", "content": text}, "length")
    chunks = events(streamed(dialect, answer, cuts))
    whole = dialect.encode(question_in(dialect), answer)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == whole["choices"][0]["text"] == text
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "length"
    assert chunks[-1]["usage"] == whole["usage"]
