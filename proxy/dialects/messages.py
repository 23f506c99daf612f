"""`/v1/messages`, as Anthropic's clients and Claude Code speak it. Stateless: the whole history comes with each request.

One user message may hold tool results and text; each result becomes a tool message of its own, in the order given. Blocks carry hints
(`cache_control`) that move from request to request and mean nothing here. Thinking comes back as a block without a signature, and is
taken back with any.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from contracts.sessions import CallKind
from proxy.canonical import Answer, Message, Question, Tool, arguments_object
from proxy.dialects import base
from proxy.errors import BadRequestError, ProxyError

_HARMLESS: Final[dict[str, tuple[object, ...]]] = {
    "container": (),
    "mcp_servers": ([],),
}
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS: Final = {
    401: "authentication_error",
    413: "request_too_large",
    502: "api_error",
    503: "overloaded_error",
}


class Messages(base.Dialect):
    """Anthropic's messages."""

    name = "messages"
    paths: ClassVar[base.Paths] = {"/v1/messages": "answer", "/v1/messages/count_tokens": "count"}

    def parse(self, body: base.Body, headers: Mapping[str, str]) -> Question:
        base.refuse(body, _HARMLESS)
        choice = base.mapping(body.get("tool_choice") or {"type": "auto"}, "tool_choice")
        tools = [] if choice.get("type") == "none" else _tools(body)
        messages: list[Message] = []
        if system := base.text_of(body.get("system"), "system"):
            messages.append({"role": "system", "content": system})
        given = base.sequence(body.get("messages"), "messages")
        for index, item in enumerate(given):
            where = f"messages[{index}]"
            messages += _messages(base.mapping(item, where), where)
        if base.not_empty(messages, "messages")[-1]["role"] == "assistant":
            raise BadRequestError("messages ends with an assistant message; an answer cannot be begun for this model")
        return Question(
            dialect=self.name,
            model=base.string(body.get("model") or "", "model"),
            messages=messages,
            tools=tools,
            max_tokens=base.positive(body.get("max_tokens"), "max_tokens"),
            stream=bool(body.get("stream")),
            must_call=_must_call(choice, tools),
            one_call=bool(choice.get("disable_parallel_tool_use")),
            schema=_schema(body),
            stop=base.texts(body.get("stop_sequences"), "stop_sequences"),
            kind=CallKind.SUBAGENT if headers.get("x-claude-code-parent-agent-id") else CallKind.TURN,
        )

    def encode(self, question: Question, answer: Answer) -> dict[str, Any]:
        return {
            **_head(question, answer.identity),
            "content": _blocks(answer.message),
            **_stopped(answer),
            "usage": _usage(answer),
        }

    def stream(self, question: Question, identity: str, created: int) -> base.Stream:
        return _Stream(question, identity)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}

    def error(self, error: ProxyError) -> dict[str, Any]:
        message = error.message
        if error.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # by these words Claude Code knows that it has to compact
        kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


class _Stream(base.Stream):
    """Blocks one after another: thinking, text, then the calls. A block is closed when the next one begins. Claude Code runs a call when
    its block is closed, so the first call's is closed at the end, and further calls come then."""

    def __init__(self, question: Question, identity: str) -> None:
        self._question = question
        self._identity = identity
        self._shown = {"thinking": "", "text": "", "tool_use": ""}
        self._open: str | None = None
        self._index = -1

    def start(self) -> bytes:
        message = {**_head(self._question, self._identity), "content": [], "stop_reason": None}
        usage = {"input_tokens": 0, "output_tokens": 0}  # how many is said at the end
        return base.event({"type": "message_start", "message": {**message, "usage": usage}}, "message_start")

    def keep_alive(self) -> bytes:
        return base.event({"type": "ping"}, "ping")

    def show(self, message: Message) -> bytes:
        parts = self._grow("thinking", message.get("reasoning_content", "")) + self._grow("text", message["content"])
        for call in message.get("tool_calls", [])[:1]:
            parts += b"" if self._open == "tool_use" else self._begin("tool_use", _tool_use(call, {}))
            if delta := call["function"]["arguments"][len(self._shown["tool_use"]) :]:
                self._shown["tool_use"] += delta
                parts += self._delta({"type": "input_json_delta", "partial_json": delta})
        return parts

    def _grow(self, kind: str, text: str) -> bytes:
        delta = text[len(self._shown[kind]) :]
        if not delta or (kind == "thinking" and self._shown["text"]):
            return b""
        parts = (
            b"" if self._open == kind else self._begin(kind, {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        )
        self._shown[kind] = text
        return parts + self._delta({"type": f"{kind}_delta", kind: delta})

    def end(self, answer: Answer) -> bytes:
        parts = self.show(answer.message)
        for call in answer.message.get("tool_calls", [])[1:]:
            parts += self._begin("tool_use", _tool_use(call, {}))
            parts += self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})
        parts += self._close()
        parts += base.event({"type": "message_delta", "delta": _stopped(answer), "usage": _usage(answer)}, "message_delta")
        return parts + base.event({"type": "message_stop"}, "message_stop")

    def fail(self, error: ProxyError) -> bytes:
        return base.event(Messages().error(error), "error")

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        parts = self._close()
        self._open, self._index = kind, self._index + 1
        return parts + base.event({"type": "content_block_start", "index": self._index, "content_block": block}, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return base.event({"type": "content_block_delta", "index": self._index, "delta": delta}, "content_block_delta")

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return base.event({"type": "content_block_stop", "index": self._index}, "content_block_stop")


def _head(question: Question, identity: str) -> dict[str, Any]:
    return {"id": f"msg_{identity}", "type": "message", "role": "assistant", "model": question.model, "stop_sequence": None}


def _stopped(answer: Answer) -> dict[str, Any]:
    reason = "stop_sequence" if answer.stop_sequence else _STOP_REASONS[answer.finish_reason]
    return {"stop_reason": reason, "stop_sequence": answer.stop_sequence}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": answer.response_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _blocks(message: Message) -> list[dict[str, Any]]:
    """The content of an answer."""
    blocks: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    calls = message.get("tool_calls", [])
    return blocks + [_tool_use(call, arguments_object(call["function"]["arguments"])) for call in calls]


def _tool_use(call: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def _messages(item: dict[str, Any], where: str) -> list[Message]:
    """One message of the request as canonical ones."""
    role, content = item.get("role"), item.get("content")
    if role == "system":  # Claude Code puts one behind the first message, too
        return [{"role": "system", "content": base.text_of(content, f"{where}.content")}]
    if role not in ("user", "assistant"):
        raise BadRequestError(f"{where}.role is {role!r}; it must be user, assistant or system")
    given = content if isinstance(content, list) else [{"type": "text", "text": base.text_of(content, f"{where}.content")}]
    blocks = [base.mapping(block, f"{where}.content[{index}]") for index, block in enumerate(given)]
    return [_assistant(blocks, where)] if role == "assistant" else _user(blocks, where)


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for index, block in enumerate(blocks):
        place, kind = f"{where}.content[{index}]", block.get("type")
        if kind == "text":
            message["content"] += base.string(block.get("text"), f"{place}.text")
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + base.string(block.get("thinking"), f"{place}.thinking")
        elif kind == "tool_use":
            arguments = json.dumps(base.mapping(block.get("input"), f"{place}.input"), ensure_ascii=False)
            call = base.tool_call(block.get("id"), base.string(block.get("name"), f"{place}.name"), arguments, place)
            message.setdefault("tool_calls", []).append(call)
        else:
            raise BadRequestError(f"{place} is of type {kind!r}; an assistant's blocks are text, thinking and tool_use")
    return message


def _user(blocks: list[dict[str, Any]], where: str) -> list[Message]:
    messages: list[Message] = []
    for index, block in enumerate(blocks):
        place, kind = f"{where}.content[{index}]", block.get("type")
        if kind == "tool_result":
            content = base.text_of(block.get("content"), f"{place}.content")
            call_id = base.string(block.get("tool_use_id"), f"{place}.tool_use_id")
            messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
        elif kind == "text":
            text = base.string(block.get("text"), f"{place}.text")
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += text
            else:
                messages.append({"role": "user", "content": text})
        else:
            raise BadRequestError(f"{place} is of type {kind!r}; this model takes text and tool results only")
    return base.not_empty(messages, f"{where}.content")


def _tools(body: base.Body) -> list[Tool]:
    tools = []
    for index, item in enumerate(base.sequence(body.get("tools"), "tools")):
        where = f"tools[{index}]"
        tool = base.mapping(item, where)
        if tool.get("type", "custom") not in ("custom", None):
            raise BadRequestError(f"{where} is of type {tool['type']!r}; only tools that the harness carries out are supported")
        spec = {"description": tool.get("description"), "parameters": tool.get("input_schema")}
        tools.append(base.function_tool(base.string(tool.get("name"), f"{where}.name"), spec, where))
    return tools


def _must_call(choice: dict[str, Any], tools: list[Tool]) -> tuple[str, ...]:
    kind = choice.get("type")
    if kind in ("auto", "none"):
        return ()
    if kind == "any":
        return base.named(base.every(tools), tools, "tool_choice")
    if kind == "tool":
        return base.named([choice.get("name")], tools, "tool_choice")
    raise BadRequestError(f"tool_choice is not supported with the type {kind!r}")


def _schema(body: base.Body) -> dict[str, Any] | None:
    config = base.mapping(body.get("output_config") or {}, "output_config")
    form = config.get("format") or body.get("output_format")
    if form is None:
        return None
    given = base.mapping(form, "output_config.format")
    base.refuse(given, {"type": ("json_schema",)}, "output_config.format")
    return base.mapping(given.get("schema"), "output_config.format.schema")
