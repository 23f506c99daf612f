"""`/v1/responses`, as OpenAI's clients and Codex speak it. Stateless: the whole history comes with each request.

Codex resolves a call by its kind, its namespace and its name; `responses_input` says what becomes of them in between. Codex runs a
call as soon as it has read its `output_item.done`, also when the stream breaks off after it; for that reason this event is sent when
the call is durable, and never for a call that was cut off.

A conversation can be compacted: `/v1/responses/compact` asks for it, and so does an input that ends in a `compaction_trigger`. The
model is asked for a summary, and the answer is a `compaction` item.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Final

from contracts.sessions import CallKind
from proxy.canonical import Answer, Message, Question, Tool, WireTool, arguments_object
from proxy.dialects import base
from proxy.dialects.responses_input import SUMMARISED, Input, custom_input, encode_summary, growing_input
from proxy.errors import BadRequestError, LimitReachedError, ProxyError

_HARMLESS: Final[dict[str, tuple[object, ...]]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),
    "max_tool_calls": (),
    "context_management": ([],),
    "moderation": (),
    "background_options": (),
}
# Calls whose text comes in pieces: the field that has it, and what the events are called.
_GROWING: Final = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
_LOGPROBS: Final = "message.output_text.logprobs"


class Responses(base.Dialect):
    """OpenAI's responses."""

    name = "responses"
    paths: ClassVar[base.Paths] = {"/v1/responses": "answer"}

    def parse(self, body: base.Body, headers: Mapping[str, str]) -> Question:
        base.refuse(body, _HARMLESS)
        if _LOGPROBS in base.sequence(body.get("include"), "include"):
            raise BadRequestError(f"'include' is not supported with the value {_LOGPROBS!r}")
        given = Input(body)
        tools = [] if body.get("tool_choice") == "none" else given.tools
        kind, window = _codex(headers)
        return Question(
            dialect=self.name,
            model=base.string(body.get("model") or "", "model"),
            messages=base.not_empty(given.messages, "input"),
            tools=tools,
            max_tokens=base.positive(body.get("max_output_tokens"), "max_output_tokens"),
            stream=bool(body.get("stream")),
            kind=CallKind.COMPACTION if given.compact else kind,
            window=max(window, given.compactions),
            names=given.names,
            compact=given.compact,
            must_call=_must_call(body.get("tool_choice"), tools, given.names),
            one_call=body.get("parallel_tool_calls") is False,
            schema=_schema(body),
        )

    def encode(self, question: Question, answer: Answer) -> dict[str, Any]:
        return _response(question, answer.identity, answer.created, answer)

    def stream(self, question: Question, identity: str, created: int) -> base.Stream:
        return _Stream(question, identity, created)


class Compact(Responses):
    """OpenAI's compaction of a conversation. The reply is what the next request's input begins with."""

    paths: ClassVar[base.Paths] = {"/v1/responses/compact": "answer"}

    def parse(self, body: base.Body, headers: Mapping[str, str]) -> Question:
        base.refuse(body, {"stream": (False,)})
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else base.sequence(given, "input")
        if not items:
            raise BadRequestError("input must not be empty")
        return super().parse({**body, "input": [*items, {"type": "compaction_trigger"}]}, headers)

    def encode(self, question: Question, answer: Answer) -> dict[str, Any]:
        said = [message["content"] for message in question.messages[:-1] if message["role"] == "user"]
        kept = [text for text in said if not text.startswith(SUMMARISED)]  # an earlier summary is part of the new one
        users = [_user_item(answer.identity, index, text) for index, text in enumerate(kept)]
        return {
            "id": f"resp_{answer.identity}",
            "object": "response.compaction",
            "created_at": answer.created,
            "output": [*users, _compaction_item(question, answer)],
            "usage": _usage(answer),
        }


class _Stream(base.Stream):
    def __init__(self, question: Question, identity: str, created: int) -> None:
        self._question = question
        self._identity = identity
        self._created = created
        self._number = 0
        self._reasoning: str | None = None  # shown so far; None before the item is added
        self._content: str | None = None
        self._inputs: dict[int, str] = {}  # what is shown of each call's arguments or input

    def start(self) -> bytes:
        return self._status("response.created") + self._status("response.in_progress")

    def keep_alive(self) -> bytes:
        return self._status("response.in_progress")

    def show(self, message: Message) -> bytes:
        if self._question.compact:  # the one item of the answer is whole or not there
            return b""
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
            item, place = _call_item(self._question, f"{self._identity}{index}", call, "in_progress"), {"output_index": first + index}
            if item["type"] not in _GROWING:
                continue
            field, event = _GROWING[item["type"]]
            if index not in self._inputs:
                self._inputs[index] = ""
                parts += self._event("response.output_item.added", **place, item={**item, field: ""})
            shown, text = self._inputs[index], item[field]
            if text.startswith(shown) and text != shown:
                self._inputs[index] = text
                delta = text[len(shown) :]
                parts += self._event(f"{event}.delta", **place, item_id=item["id"], delta=delta)
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
        elif item["type"] in _GROWING:
            if item["status"] == "incomplete":
                return b""
            field, event = _GROWING[item["type"]]
            parts += self._event(f"{event}.done", output_index=index, item_id=item["id"], **{field: item[field]})
        else:
            parts += self._event("response.output_item.added", output_index=index, item=item)
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
        usage = _usage(answer)
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


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.response_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.response_tokens,
    }


def _output(question: Question, answer: Answer, status: str) -> list[dict[str, Any]]:
    """The items of an answer. One with nothing in it is an empty message, so that a harness has something to echo."""
    if question.compact:
        return [_compaction_item(question, answer)]
    message, identity = answer.message, answer.identity
    calls = message.get("tool_calls", [])
    items = []
    if reasoning := message.get("reasoning_content"):
        items.append(_reasoning_item(identity, reasoning))
    if message["content"] or not calls:
        items.append(_message_item(identity, message["content"], status))
    for index, call in enumerate(calls):
        cut = status == "incomplete" and not _is_object(call["function"]["arguments"])
        items.append(_call_item(question, f"{identity}{index}", call, "incomplete" if cut else "completed"))
    return items


def _is_object(text: str) -> bool:
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(text), dict)
    return False


def _call_item(question: Question, identity: str, call: dict[str, Any], status: str) -> dict[str, Any]:
    """A call, as the harness that offered the tool knows it."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    wire = question.names.get(name) or WireTool("function", "", name)
    item: dict[str, Any] = {"call_id": call["id"], "status": status}
    if wire.kind == "tool_search":
        search = {"type": "tool_search_call", "id": f"tsc_{identity}", "execution": "client"}
        return {**search, **item, "arguments": arguments_object(arguments)}
    item |= {"name": wire.name, **({"namespace": wire.namespace} if wire.namespace else {})}
    if wire.kind == "custom":
        return {
            "type": "custom_tool_call",
            "id": f"ctc_{identity}",
            **item,
            "input": growing_input(arguments) if status == "in_progress" else custom_input(arguments),
        }
    return {"type": "function_call", "id": f"fc_{identity}", **item, "arguments": arguments}


def _compaction_item(question: Question, answer: Answer) -> dict[str, Any]:
    content = encode_summary(answer.message["content"], question.window + 1)
    return {"type": "compaction", "id": f"cmp_{answer.identity}", "encrypted_content": content}


def _user_item(identity: str, index: int, text: str) -> dict[str, Any]:
    part = {"type": "input_text", "text": text}
    return {"type": "message", "id": f"msg_{identity}{index}", "role": "user", "status": "completed", "content": [part]}


def _message_item(identity: str, text: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{identity}", "role": "assistant", "status": status, "content": [part]}


def _reasoning_item(identity: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{identity}", "summary": [], "content": content, "encrypted_content": None}


def _must_call(choice: object, tools: list[Tool], names: Mapping[str, WireTool]) -> tuple[str, ...]:
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        return base.named(base.every(tools), tools, "tool_choice")
    chosen = base.mapping(choice, "tool_choice")
    items = [chosen]
    if chosen.get("type") == "allowed_tools" and chosen.get("mode") == "required":
        items = [base.mapping(item, "tool_choice.tools") for item in base.sequence(chosen.get("tools"), "tool_choice.tools")]
    if any(item.get("type") not in ("function", "custom") for item in items):
        raise BadRequestError(f"tool_choice is not supported with the value {str(choice)[:200]}")
    canonical = {(wire.namespace, wire.name): name for name, wire in names.items()}
    return base.named(
        [canonical.get((str(item.get("namespace") or ""), str(item.get("name"))), item.get("name")) for item in items], tools, "tool_choice"
    )


def _schema(body: base.Body) -> dict[str, Any] | None:
    text = base.mapping(body.get("text") or {}, "text")
    form = base.mapping(text.get("format") or {"type": "text"}, "text.format")
    if form.get("type") == "json_schema":
        return base.mapping(form.get("schema") or {}, "text.format.schema")
    if form.get("type") == "json_object":
        return {"type": "object"}
    base.refuse(form, {"type": ("text",)}, "text.format")
    return None


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
