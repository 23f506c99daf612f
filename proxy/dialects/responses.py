"""`/v1/responses`, as OpenAI's clients and Codex speak it. Stateless: the whole history comes with each request.

Codex resolves a call by (namespace, name), so a tool of a namespace gets a canonical name of its own and is taken apart again
in the reply. Codex runs a function call as soon as it has read its `output_item.done`, also when the stream breaks off after
it; for that reason this event is sent when the call is durable, and never for a call that was cut off.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Final

from contracts.sessions import CallKind
from proxy.canonical import Answer, Message, Question, Tool
from proxy.dialects import base
from proxy.errors import BadRequestError, LimitReachedError, ProxyError

_HARMLESS: Final = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),
    "max_tool_calls": (),
}
_TEXT_PARTS: Final = ("input_text", "output_text", "text", "refusal")


class Responses(base.Dialect):
    """OpenAI's responses."""

    name = "responses"
    paths: ClassVar[base.Paths] = {"/v1/responses": "answer"}

    def parse(self, body: base.Body, headers: Mapping[str, str]) -> Question:
        base.refuse(body, _HARMLESS)
        tools, names = _tools(body)
        if body.get("tool_choice") == "none":
            tools = []
        flat = {pair: name for name, pair in names.items()}
        kind, window = _codex(headers)
        return Question(
            dialect=self.name,
            model=base.string(body.get("model") or "", "model"),
            messages=base.not_empty(_messages(body, flat), "input"),
            tools=tools,
            max_tokens=base.positive(body.get("max_output_tokens"), "max_output_tokens"),
            stream=bool(body.get("stream")),
            kind=kind,
            window=window,
            names=names,
            must_call=_must_call(body.get("tool_choice"), tools, flat),
            one_call=body.get("parallel_tool_calls") is False,
            schema=_schema(body),
        )

    def encode(self, question: Question, answer: Answer) -> dict[str, Any]:
        return _response(question, answer.identity, answer.created, answer)

    def stream(self, question: Question, identity: str, created: int) -> base.Stream:
        return _Stream(question, identity, created)


class _Stream(base.Stream):
    def __init__(self, question: Question, identity: str, created: int) -> None:
        self._question = question
        self._identity = identity
        self._created = created
        self._number = 0
        self._reasoning: str | None = None  # shown so far; None before the item is added
        self._content: str | None = None
        self._arguments: list[str] = []  # of each call that is shown

    def start(self) -> bytes:
        return self._status("response.created") + self._status("response.in_progress")

    def keep_alive(self) -> bytes:
        return self._status("response.in_progress")

    def show(self, message: Message) -> bytes:
        parts = self._show_reasoning(message.get("reasoning_content", "")) + self._show_content(message["content"])
        return parts + self._show_calls(message.get("tool_calls", []))

    def _show_reasoning(self, text: str) -> bytes:
        parts = b""
        if text and self._reasoning is None:
            self._reasoning = ""
            parts += self._event("response.output_item.added", output_index=0, item=_reasoning_item(self._identity, None))
        if self._reasoning is not None and (delta := text[len(self._reasoning) :]):
            self._reasoning = text
            parts += self._event("response.reasoning_text.delta", **self._part("rs", 0), delta=delta)
        return parts

    def _show_content(self, text: str) -> bytes:
        parts, index = b"", 0 if self._reasoning is None else 1
        if text and self._content is None:
            self._content = ""
            item = _message_item(self._identity, "", "in_progress")
            parts += self._event("response.output_item.added", output_index=index, item={**item, "content": []})
            parts += self._event("response.content_part.added", **self._part("msg", index), part=item["content"][0])
        if self._content is not None and (delta := text[len(self._content) :]):
            self._content = text
            parts += self._event("response.output_text.delta", **self._part("msg", index), delta=delta, logprobs=[])
        return parts

    def _show_calls(self, calls: list[dict[str, Any]]) -> bytes:
        parts, first = b"", (self._reasoning is not None) + (self._content is not None)
        for index, call in enumerate(calls):
            item, place = _call_item(self._question, self._identity, index, call, "in_progress"), {"output_index": first + index}
            if index == len(self._arguments):
                self._arguments.append("")
                parts += self._event("response.output_item.added", **place, item={**item, "arguments": ""})
            if delta := item["arguments"][len(self._arguments[index]) :]:
                self._arguments[index] += delta
                parts += self._event("response.function_call_arguments.delta", **place, item_id=item["id"], delta=delta)
        return parts

    def end(self, answer: Answer) -> bytes:
        parts = self.show(answer.message)
        response = _response(self._question, self._identity, self._created, answer)
        for index, item in enumerate(response["output"]):
            parts += self._item(index, item)
        final = "response.completed" if response["status"] == "completed" else "response.incomplete"
        return parts + self._event(final, response=response)

    def _item(self, index: int, item: dict[str, Any]) -> bytes:
        """What is left to say of one item of the output."""
        parts = b""
        if item["type"] == "reasoning":
            parts += self._event("response.reasoning_text.done", **self._part("rs", index), text=item["content"][0]["text"])
        elif item["type"] == "message":
            part = item["content"][0]
            if self._content is None:
                added = {**item, "status": "in_progress", "content": []}
                parts += self._event("response.output_item.added", output_index=index, item=added)
                parts += self._event("response.content_part.added", **self._part("msg", index), part=part)
            parts += self._event("response.output_text.done", **self._part("msg", index), text=part["text"], logprobs=[])
            parts += self._event("response.content_part.done", **self._part("msg", index), part=part)
        else:
            place = {"output_index": index, "item_id": item["id"]}
            parts += self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
            if item["status"] == "incomplete":
                return b""
        return parts + self._event("response.output_item.done", output_index=index, item=item)

    def fail(self, error: ProxyError) -> bytes:
        """Codex stops at `context_length_exceeded` and `invalid_prompt`, and asks again after any other code."""
        code = error.code
        if isinstance(error, LimitReachedError | BadRequestError) and code != "context_length_exceeded":
            code = "invalid_prompt"
        response = _response(self._question, self._identity, self._created, None)
        response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=response)

    def _part(self, prefix: str, index: int) -> dict[str, Any]:
        return {"item_id": f"{prefix}_{self._identity}", "output_index": index, "content_index": 0}

    def _status(self, kind: str) -> bytes:
        return self._event(kind, response=_response(self._question, self._identity, self._created, None))

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return base.event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)


def _response(question: Question, identity: str, created: int, answer: Answer | None) -> dict[str, Any]:
    """The response object; without an answer, of a response in progress."""
    status, usage, output = "in_progress", None, []
    if answer:
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        output = _output(question, answer, status)
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.response_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.response_tokens,
        }
    return {
        "id": f"resp_{identity}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": question.model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage,
    }


def _output(question: Question, answer: Answer, status: str) -> list[dict[str, Any]]:
    """The items of an answer. One with nothing in it is an empty message, so that a harness has something to echo."""
    message, identity = answer.message, answer.identity
    calls = message.get("tool_calls", [])
    items = []
    if reasoning := message.get("reasoning_content"):
        items.append(_reasoning_item(identity, reasoning))
    if message["content"] or not calls:
        items.append(_message_item(identity, message["content"], status))
    for index, call in enumerate(calls):
        cut = status == "incomplete" and not _is_object(call["function"]["arguments"])
        items.append(_call_item(question, identity, index, call, "incomplete" if cut else "completed"))
    return items


def _is_object(text: str) -> bool:
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(text), dict)
    return False


def _call_item(question: Question, identity: str, index: int, call: dict[str, Any], status: str) -> dict[str, Any]:
    function = call["function"]
    namespace, name = question.names.get(function["name"], (None, function["name"]))
    item = {
        "type": "function_call",
        "id": f"fc_{identity}{index}",
        "call_id": call["id"],
        "name": name,
        "arguments": function["arguments"],
        "status": status,
    }
    return {**item, "namespace": namespace} if namespace else item


def _message_item(identity: str, text: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{identity}", "role": "assistant", "status": status, "content": [part]}


def _reasoning_item(identity: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{identity}", "summary": [], "content": content, "encrypted_content": None}


def _tools(body: base.Body) -> tuple[list[Tool], dict[str, tuple[str, str]]]:
    """The tools in canonical form, and for those in a namespace, canonical name to (namespace, name)."""
    tools: list[Tool] = []
    names: dict[str, tuple[str, str]] = {}
    for index, item in enumerate(base.sequence(body.get("tools"), "tools")):
        where = f"tools[{index}]"
        tool = base.mapping(item, where)
        if tool.get("type") == "function":
            tools.append(base.function_tool(base.string(tool.get("name"), f"{where}.name"), tool, where))
        elif tool.get("type") == "namespace":
            namespace = base.string(tool.get("name"), f"{where}.name")
            for inner in base.sequence(tool.get("tools"), f"{where}.tools"):
                function = base.mapping(inner, where)
                name = base.string(function.get("name"), f"{where}.tools.name")
                canonical = _canonical_name(namespace, name)
                names[canonical] = (namespace, name)
                tools.append(base.function_tool(canonical, function, where))
        else:
            raise BadRequestError(f"{where} is of type {tool.get('type')!r}; only function and namespace are supported")
    return tools, names


def _must_call(choice: object, tools: list[Tool], flat: Mapping[tuple[str, str], str]) -> tuple[str, ...]:
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        return base.named(base.every(tools), tools, "tool_choice")
    chosen = base.mapping(choice, "tool_choice")
    items = [chosen]
    if chosen.get("type") == "allowed_tools" and chosen.get("mode") == "required":
        items = [base.mapping(item, "tool_choice.tools") for item in base.sequence(chosen.get("tools"), "tool_choice.tools")]
    if any(item.get("type") != "function" for item in items):
        raise BadRequestError(f"tool_choice is not supported with the value {str(choice)[:200]}")
    names = [flat.get((str(item.get("namespace")), str(item.get("name"))), item.get("name")) for item in items]
    return base.named(names, tools, "tool_choice")


def _schema(body: base.Body) -> dict[str, Any] | None:
    text = base.mapping(body.get("text") or {}, "text")
    form = base.mapping(text.get("format") or {"type": "text"}, "text.format")
    if form.get("type") == "json_schema":
        return base.mapping(form.get("schema") or {}, "text.format.schema")
    if form.get("type") == "json_object":
        return {"type": "object"}
    base.refuse(form, {"type": ("text",)}, "text.format")
    return None


def _canonical_name(namespace: str, name: str) -> str:
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def _messages(body: base.Body, flat: Mapping[tuple[str, str], str]) -> list[Message]:
    messages: list[Message] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": base.string(instructions, "instructions")})
    given = body.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for index, item in enumerate(base.sequence(given, "input")):
        _take(messages, base.mapping(item, f"input[{index}]"), f"input[{index}]", flat)
    return messages


def _take(messages: list[Message], item: dict[str, Any], where: str, flat: Mapping[tuple[str, str], str]) -> None:
    """Add one item of the input. Reasoning, text and calls of one answer are one message, as they were sampled."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        parts = base.sequence(item.get("content") or item.get("summary"), f"{where}.content")
        text = base.text_of(parts, f"{where}.content", ("reasoning_text", "summary_text", "text"))
        _assistant(messages, after=()).update({"reasoning_content": text} if text else {})
    elif kind == "message" and item.get("role") == "assistant":
        text = base.text_of(item.get("content"), f"{where}.content", _TEXT_PARTS)
        _assistant(messages, after=("tool_calls",))["content"] += text
    elif kind == "message":
        role = {"system": "system", "developer": "system", "user": "user"}.get(str(item.get("role")))
        if role is None:
            raise BadRequestError(f"{where}.role is {item.get('role')!r}; it must be system, developer, user or assistant")
        messages.append({"role": role, "content": base.text_of(item.get("content"), f"{where}.content", _TEXT_PARTS)})
    elif kind == "function_call":
        name = base.string(item.get("name"), f"{where}.name")
        if namespace := item.get("namespace"):
            pair = (base.string(namespace, f"{where}.namespace"), name)
            name = flat.get(pair) or _canonical_name(*pair)
        call = base.tool_call(item.get("call_id"), name, item.get("arguments"), where)
        _assistant(messages, after=()).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = base.text_of(item.get("output"), f"{where}.output", _TEXT_PARTS)
        call_id = base.string(item.get("call_id"), f"{where}.call_id")
        messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
    else:
        raise BadRequestError(f"{where} is of type {kind!r}, which is not supported")


def _assistant(messages: list[Message], after: tuple[str, ...]) -> Message:
    """The assistant message that the next part belongs to: a new one after anything else, or if the last has `after`."""
    if not messages or messages[-1]["role"] != "assistant" or any(key in messages[-1] for key in after):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _codex(headers: Mapping[str, str]) -> tuple[CallKind, int]:
    """What Codex says of a request in its headers: what it is for, and in which context window."""
    kind, window = CallKind.TURN, 0
    with suppress(ValueError, RecursionError):
        metadata = json.loads(headers.get("x-codex-turn-metadata", "{}"))
        if isinstance(metadata, dict):
            if metadata.get("request_kind") == "compaction":
                kind = CallKind.COMPACTION
            number = metadata.get("window_number")
            window = number if isinstance(number, int) and 0 <= number < 2**31 else 0
    if kind is CallKind.TURN and headers.get("x-openai-subagent"):
        kind = CallKind.SUBAGENT
    return kind, window
