"""`/v1/chat/completions`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from proxy.canonical import Answer, Message, Question, Tool
from proxy.dialects import base
from proxy.errors import BadRequestError, ProxyError

_HARMLESS: Final = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("auto", "none"),
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
        tools = [] if body.get("tool_choice") == "none" else _tools(body)
        options = base.mapping(body.get("stream_options") or {}, "stream_options")
        return Question(
            dialect=self.name,
            model=base.string(body.get("model") or "", "model"),
            messages=base.not_empty(messages, "messages"),
            tools=tools,
            max_tokens=base.positive(body.get("max_completion_tokens", body.get("max_tokens")), "max_tokens"),
            stream=bool(body.get("stream")),
            include_usage=bool(options.get("include_usage")),
            must_call=_must_call(body.get("tool_choice"), tools),
            one_call=body.get("parallel_tool_calls") is False,
            schema=_schema(body),
            stop=base.texts(body.get("stop"), "stop"),
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
        self._arguments: list[int] = []  # characters shown of each call's arguments
        self._head = {
            "id": f"chatcmpl-{identity}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": question.model,
        }

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def show(self, message: Message) -> bytes:
        parts = b""
        for field in ("reasoning_content", "content"):
            if delta := message.get(field, "")[len(self._shown[field]) :]:
                parts += self._chunk({field: delta})
                self._shown[field] += delta
        for index, call in enumerate(message.get("tool_calls", [])):
            arguments = call["function"]["arguments"]
            if index == len(self._arguments):
                self._arguments.append(len(arguments))
                parts += self._chunk({"tool_calls": [{"index": index, **call}]})
            elif delta := arguments[self._arguments[index] :]:
                self._arguments[index] = len(arguments)
                parts += self._chunk({"tool_calls": [{"index": index, "function": {"arguments": delta}}]})
        return parts

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def end(self, answer: Answer) -> bytes:
        parts = self.show(answer.message) + self._chunk({}, answer.finish_reason)
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


def _must_call(choice: object, tools: list[Tool]) -> tuple[str, ...]:
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        return base.named(base.every(tools), tools, "tool_choice")
    chosen = base.mapping(choice, "tool_choice")
    if chosen.get("type") == "function":
        return base.named([base.mapping(chosen.get("function"), "tool_choice.function").get("name")], tools, "tool_choice")
    allowed = base.mapping(chosen.get("allowed_tools") or {}, "tool_choice.allowed_tools")
    if chosen.get("type") == "allowed_tools" and allowed.get("mode") == "required":
        items = [base.mapping(item, "tool_choice.allowed_tools.tools") for item in base.sequence(allowed.get("tools"), "tool_choice")]
        return base.named([base.mapping(item.get("function") or {}, "tool_choice").get("name") for item in items], tools, "tool_choice")
    raise BadRequestError(f"tool_choice is not supported with the value {str(choice)[:200]}")


def _schema(body: base.Body) -> dict[str, Any] | None:
    form = base.mapping(body.get("response_format") or {"type": "text"}, "response_format")
    if form.get("type") == "json_schema":
        return base.mapping(
            base.mapping(form.get("json_schema"), "response_format.json_schema").get("schema") or {}, "response_format.schema"
        )
    if form.get("type") == "json_object":
        return {"type": "object"}
    base.refuse(form, {"type": ("text",)}, "response_format")
    return None
