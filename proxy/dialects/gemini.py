"""`generateContent`, as Google's clients and Gemini CLI speak it. Stateless: the whole history comes with each request.

Model and streaming are in the path, so the routes put them into the body. Calls have ids here as in the newer clients, and may come
back without them. A tool's answer is an object: `{"output": text}` and `{"result": text}` are that text,
anything else is its JSON.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from proxy.canonical import Answer, Message, Question, Tool, arguments_object
from proxy.dialects import base
from proxy.errors import BadRequestError, ProxyError

_METHODS: Final[dict[str, base.Reply]] = {"generateContent": "answer", "streamGenerateContent": "stream", "countTokens": "count"}
_FINISH_REASONS: Final = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}
_STATUS: Final = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 413: "INVALID_ARGUMENT", 502: "UNAVAILABLE", 503: "UNAVAILABLE"}
_HARMLESS: Final = {"cachedContent": ()}
_HARMLESS_CONFIG: Final = {
    "candidateCount": (1,),
    "responseMimeType": ("text/plain", "application/json"),
    "responseModalities": (["TEXT"],),
    "responseLogprobs": (False,),
}


class Gemini(base.Dialect):
    """Google's generateContent."""

    name = "gemini"
    paths: ClassVar[base.Paths] = {
        f"/{version}/models/{{model}}:{method}": reply for version in ("v1", "v1beta") for method, reply in _METHODS.items()
    }

    def parse(self, body: base.Body, headers: Mapping[str, str]) -> Question:
        base.refuse(body, _HARMLESS)
        config = base.mapping(body.get("generationConfig") or {}, "generationConfig")
        base.refuse(config, _HARMLESS_CONFIG, "generationConfig")
        tool_config = base.mapping(body.get("toolConfig") or {}, "toolConfig")
        calling = base.mapping(tool_config.get("functionCallingConfig") or {}, "toolConfig.functionCallingConfig")
        base.refuse(calling, {"mode": ("AUTO", "NONE", "ANY", "MODE_UNSPECIFIED")}, "toolConfig.functionCallingConfig")
        tools = [] if calling.get("mode") == "NONE" else _tools(body)
        messages: list[Message] = []
        if system := body.get("systemInstruction"):
            parts = base.sequence(base.mapping(system, "systemInstruction").get("parts"), "systemInstruction.parts")
            messages.append({"role": "system", "content": "".join(_text(part, "systemInstruction.parts") for part in parts)})
        for index, item in enumerate(base.sequence(body.get("contents"), "contents")):
            where = f"contents[{index}]"
            messages += _messages(base.mapping(item, where), where)
        return Question(
            dialect=self.name,
            model=base.string(body.get("model") or "", "model"),
            messages=base.not_empty(messages, "contents"),
            tools=tools,
            max_tokens=base.positive(config.get("maxOutputTokens"), "generationConfig.maxOutputTokens"),
            stream=bool(body.get("stream")),
            must_call=_must_call(calling, tools),
            schema=_schema(config),
            stop=base.texts(config.get("stopSequences"), "stopSequences"),
        )

    def encode(self, question: Question, answer: Answer) -> dict[str, Any]:
        return _response(question, answer.identity, _parts(answer.message), answer)

    def stream(self, question: Question, identity: str, created: int) -> base.Stream:
        return _Stream(question, identity)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"totalTokens": tokens}

    def error(self, error: ProxyError) -> dict[str, Any]:
        return {"error": {"code": error.status, "message": error.message, "status": _STATUS.get(error.status, "INTERNAL")}}


class _Stream(base.Stream):
    """Every event is a response of its own, with the parts that are new. A call is one part, so it comes whole, and at the end."""

    def __init__(self, question: Question, identity: str) -> None:
        self._question = question
        self._identity = identity
        self._content = self._reasoning = ""

    def start(self) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return self._event([])

    def show(self, message: Message) -> bytes:
        parts = self._new(message)
        return self._event(parts) if parts else b""

    def end(self, answer: Answer) -> bytes:
        parts = self._new(answer.message)
        parts += [part for part in _parts(answer.message) if "functionCall" in part]
        return self._event(parts, answer)

    def fail(self, error: ProxyError) -> bytes:
        return base.event(Gemini().error(error))

    def _new(self, message: Message) -> list[dict[str, Any]]:
        content, reasoning = message["content"], message.get("reasoning_content", "")
        parts: list[dict[str, Any]] = []
        if delta := reasoning[len(self._reasoning) :]:
            parts.append({"text": delta, "thought": True})
            self._reasoning = reasoning
        if delta := content[len(self._content) :]:
            parts.append({"text": delta})
            self._content = content
        return parts

    def _event(self, parts: list[dict[str, Any]], answer: Answer | None = None) -> bytes:
        return base.event(_response(self._question, self._identity, parts, answer))


def _response(question: Question, identity: str, parts: list[dict[str, Any]], answer: Answer | None) -> dict[str, Any]:
    """A response; without an answer it is a part of one that goes on."""
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    response: dict[str, Any] = {"candidates": [candidate], "modelVersion": question.model, "responseId": identity}
    if answer:
        candidate["finishReason"] = _FINISH_REASONS[answer.finish_reason]
        response["usageMetadata"] = {
            "promptTokenCount": answer.prompt_tokens,
            "candidatesTokenCount": answer.response_tokens,
            "totalTokenCount": answer.prompt_tokens + answer.response_tokens,
        }
    return response


def _parts(message: Message) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        parts.append({"text": reasoning, "thought": True})
    if message["content"]:
        parts.append({"text": message["content"]})
    for call in message.get("tool_calls", []):
        function = call["function"]
        parts.append({"functionCall": {"id": call["id"], "name": function["name"], "args": arguments_object(function["arguments"])}})
    return parts


def _text(part: object, where: str) -> str:
    return base.string(base.mapping(part, where).get("text"), f"{where}.text")


def _messages(item: dict[str, Any], where: str) -> list[Message]:
    """One content of the request as canonical messages."""
    role = item.get("role") or "user"
    if role not in ("user", "model", "function"):
        raise BadRequestError(f"{where}.role is {role!r}; it must be user, model or function")
    given = base.sequence(item.get("parts"), f"{where}.parts")
    parts = [base.mapping(part, f"{where}.parts[{index}]") for index, part in enumerate(given)]
    return [_assistant(parts, where)] if role == "model" else _user(parts, where)


def _assistant(parts: list[dict[str, Any]], where: str) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for index, part in enumerate(parts):
        place = f"{where}.parts[{index}]"
        if "functionCall" in part:
            call = base.mapping(part["functionCall"], f"{place}.functionCall")
            arguments = json.dumps(base.mapping(call.get("args") or {}, f"{place}.args"), ensure_ascii=False)
            name = base.string(call.get("name"), f"{place}.name")
            message.setdefault("tool_calls", []).append(base.tool_call(call.get("id") or f"{name}{index}", name, arguments, place))
        elif part.get("thought"):
            message["reasoning_content"] = message.get("reasoning_content", "") + _text(part, place)
        else:
            message["content"] += _text(part, place)
    return message


def _user(parts: list[dict[str, Any]], where: str) -> list[Message]:
    messages: list[Message] = []
    for index, part in enumerate(parts):
        place = f"{where}.parts[{index}]"
        if "functionResponse" in part:
            response = base.mapping(part["functionResponse"], f"{place}.functionResponse")
            name = base.string(response.get("name"), f"{place}.name")
            content = _output(base.mapping(response.get("response") or {}, f"{place}.response"))
            call_id = base.string(response.get("id") or f"{name}{index}", f"{place}.id")
            messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
        elif "text" not in part:
            raise BadRequestError(f"{place} holds {', '.join(sorted(part)) or 'nothing'}; this model takes text and functionResponse only")
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += _text(part, place)
        else:
            messages.append({"role": "user", "content": _text(part, place)})
    return base.not_empty(messages, f"{where}.parts")


def _output(response: dict[str, Any]) -> str:
    if len(response) == 1:
        ((key, value),) = response.items()
        if key in ("output", "result") and isinstance(value, str):
            return value
    return json.dumps(response, ensure_ascii=False)


def _tools(body: base.Body) -> list[Tool]:
    tools = []
    for index, item in enumerate(base.sequence(body.get("tools"), "tools")):
        tool = base.mapping(item, f"tools[{index}]")
        if other := sorted(set(tool) - {"functionDeclarations"}):
            raise BadRequestError(f"tools[{index}] holds {', '.join(other)}; only functionDeclarations are supported")
        for number, declared in enumerate(base.sequence(tool.get("functionDeclarations"), f"tools[{index}].functionDeclarations")):
            where = f"tools[{index}].functionDeclarations[{number}]"
            spec = base.mapping(declared, where)
            parameters = spec.get("parametersJsonSchema", spec.get("parameters"))
            tools.append(base.function_tool(base.string(spec.get("name"), f"{where}.name"), {**spec, "parameters": parameters}, where))
    return tools


def _must_call(calling: dict[str, Any], tools: list[Tool]) -> tuple[str, ...]:
    allowed = base.texts(calling.get("allowedFunctionNames"), "allowedFunctionNames")
    if calling.get("mode") == "ANY":
        return base.named(allowed or base.every(tools), tools, "toolConfig")
    if allowed:
        raise BadRequestError("toolConfig: 'allowedFunctionNames' needs the mode ANY")
    return ()


def _schema(config: dict[str, Any]) -> dict[str, Any] | None:
    if config.get("responseMimeType") != "application/json":
        base.refuse(config, {"responseSchema": (), "responseJsonSchema": ()}, "generationConfig")
        return None
    if (schema := config.get("responseJsonSchema")) is not None:
        return base.mapping(schema, "responseJsonSchema")
    return _json_schema(base.mapping(config.get("responseSchema") or {}, "responseSchema"))


def _json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Google's form of a schema (types in capitals, `nullable`) as JSON schema."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, str):
            found[key] = value.lower()
        elif key == "properties" and isinstance(value, dict):
            found[key] = {name: _json_schema(base.mapping(inner, f"responseSchema.{name}")) for name, inner in value.items()}
        elif key == "items" and isinstance(value, dict):
            found[key] = _json_schema(value)
        elif key == "anyOf" and isinstance(value, list):
            found[key] = [_json_schema(base.mapping(inner, "responseSchema.anyOf")) for inner in value]
        elif key not in ("nullable", "propertyOrdering", "example"):
            found[key] = value
    return {"anyOf": [found, {"type": "null"}]} if schema.get("nullable") else found
