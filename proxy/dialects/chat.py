"""`/v1/chat/completions`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from proxy.canonical import Answer, Message, Question, Tool
from proxy.dialects import base
from proxy.errors import BadRequestError, ProxyError

_HARMLESS: Final = {
    "n": (1,),
    "stop": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "tool_choice": ("auto", "none"),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "modalities": (["text"],),
}


class ChatCompletions(base.Dialect):
    """OpenAI's chat completions."""

    name = "chat"
    paths: ClassVar[base.Paths] = {"/v1/chat/completions": "answer"}

    def parse(self, body: base.Body, headers: Mapping[str, str]) -> Question:
        base.refuse(body, _HARMLESS)
        messages = [
            _message(base.mapping(item, f"messages[{index}]"), f"messages[{index}]")
            for index, item in enumerate(base.sequence(body.get("messages"), "messages"))
        ]
        options = base.mapping(body.get("stream_options") or {}, "stream_options")
        return Question(
            dialect=self.name,
            model=base.string(body.get("model") or "", "model"),
            messages=base.not_empty(messages, "messages"),
            tools=[] if body.get("tool_choice") == "none" else _tools(body),
            max_tokens=base.positive(body.get("max_completion_tokens", body.get("max_tokens")), "max_tokens"),
            stream=bool(body.get("stream")),
            include_usage=bool(options.get("include_usage")),
        )

    def encode(self, question: Question, answer: Answer) -> dict[str, Any]:
        message = {**answer.message, "refusal": None}
        if answer.message.get("tool_calls") and not message["content"]:
            message["content"] = None
        return {
            "id": f"chatcmpl-{answer.identity}",
            "object": "chat.completion",
            "created": answer.created,
            "model": question.model,
            "choices": [{"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}],
            "usage": base.usage(answer),
        }

    def stream(self, question: Question, identity: str, created: int) -> base.Stream:
        return _Stream(question, identity, created)


class _Stream(base.Stream):
    def __init__(self, question: Question, identity: str, created: int) -> None:
        self._include_usage = question.include_usage
        self._shown = {"content": "", "reasoning_content": ""}
        self._head = {
            "id": f"chatcmpl-{identity}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": question.model,
        }

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def show(self, content: str, reasoning: str) -> bytes:
        parts = b""
        for field, text in (("reasoning_content", reasoning), ("content", content)):
            if delta := text[len(self._shown[field]) :]:
                parts += self._chunk({field: delta})
                self._shown[field] = text
        return parts

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def end(self, answer: Answer) -> bytes:
        parts = self.show(answer.message["content"], answer.message.get("reasoning_content", ""))
        for index, call in enumerate(answer.message.get("tool_calls", [])):
            parts += self._chunk({"tool_calls": [{"index": index, **call}]})
        parts += self._chunk({}, answer.finish_reason)
        if self._include_usage:
            parts += base.event({**self._head, "choices": [], "usage": base.usage(answer)})
        return parts + base.event("[DONE]")

    def fail(self, error: ProxyError) -> bytes:
        return base.event(base.openai_error(error))

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return base.event({**self._head, "choices": [choice]})


def _message(item: dict[str, Any], where: str) -> Message:
    role = item.get("role")
    content = base.text_of(item.get("content"), f"{where}.content", ("text", "refusal"))
    if role in ("system", "developer"):
        return {"role": "system", "content": content}
    if role == "user":
        return {"role": "user", "content": content}
    if role == "tool":
        return {"role": "tool", "content": content, "tool_call_id": base.string(item.get("tool_call_id"), f"{where}.tool_call_id")}
    if role != "assistant":
        raise BadRequestError(f"{where}.role is {role!r}; it must be system, developer, user, assistant or tool")
    message: Message = {"role": "assistant", "content": content}
    if reasoning := item.get("reasoning_content") or item.get("reasoning"):
        message["reasoning_content"] = base.string(reasoning, f"{where}.reasoning_content")
    if calls := base.sequence(item.get("tool_calls"), f"{where}.tool_calls"):
        message["tool_calls"] = [_tool_call(base.mapping(call, where), f"{where}.tool_calls") for call in calls]
    return message


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = base.mapping(call.get("function"), f"{where}.function")
    return base.tool_call(call.get("id"), base.string(function.get("name"), f"{where} name"), function.get("arguments"), where)


def _tools(body: base.Body) -> list[Tool]:
    tools = []
    for index, item in enumerate(base.sequence(body.get("tools"), "tools")):
        where = f"tools[{index}]"
        tool = base.mapping(item, where)
        if tool.get("type") != "function":
            raise BadRequestError(f"{where} is of type {tool.get('type')!r}; only functions are supported")
        function = base.mapping(tool.get("function"), f"{where}.function")
        tools.append(base.function_tool(base.string(function.get("name"), f"{where}.function.name"), function, where))
    return tools
