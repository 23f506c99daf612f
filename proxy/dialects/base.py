"""The shape of a dialect: parse a request into canonical form, encode an answer, whole or as a stream of events.

A dialect knows nothing of sessions, tokens or engines. Fields that would change what is sampled and that the proxy does not
honour are refused by name, never swallowed. Fields that decide sampling (temperature, top_p, seed, penalties) are read by
nobody, because the run decides sampling.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from proxy.canonical import Answer, Message, Question, Tool
from proxy.errors import BadRequestError, ProxyError

Body = Mapping[str, Any]
# What a path is for: an answer (streamed if the body says so), a streamed one, or the number of a prompt's tokens.
Reply = Literal["answer", "stream", "count"]
Paths = Mapping[str, Reply]


class Stream(ABC):
    """Encodes one streamed reply. Methods are called in this order: start, then show and keep_alive, then end or fail."""

    @abstractmethod
    def start(self) -> bytes:
        """What is sent before the first token."""

    @abstractmethod
    def show(self, message: Message) -> bytes:
        """The answer so far; each call extends the one before. Of a tool call it may send all but what says that the call is whole."""

    @abstractmethod
    def keep_alive(self) -> bytes:
        """Something that resets the harness's idle timer and means nothing."""

    @abstractmethod
    def end(self, answer: Answer) -> bytes:
        """All that is left, the call being durable."""

    @abstractmethod
    def fail(self, error: ProxyError) -> bytes:
        """The answer will not come."""


class Dialect(ABC):
    """One wire format."""

    name: ClassVar[str]
    paths: ClassVar[Paths]

    @abstractmethod
    def parse(self, body: Body, headers: Mapping[str, str]) -> Question:
        """Canonical form of a request. Raises BadRequestError, naming the field."""

    @abstractmethod
    def encode(self, question: Question, answer: Answer) -> dict[str, Any]:
        """The reply as one JSON object."""

    @abstractmethod
    def stream(self, question: Question, identity: str, created: int) -> Stream:
        """An encoder for one streamed reply, whose ids are made from `identity`."""

    def count(self, tokens: int) -> dict[str, Any]:
        """The reply to a request at a path that counts. A dialect that lists one says its own; it is asked of no other."""
        raise TypeError(f"the dialect {self.name} has no path that counts")

    def error(self, error: ProxyError) -> dict[str, Any]:
        """The reply that says why there is no answer."""
        return openai_error(error)


def openai_error(error: ProxyError) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


def event(data: object, name: str | None = None) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode() if name else f"data: {text}\n\n".encode()


def usage(answer: Answer) -> dict[str, int]:
    """OpenAI's count of tokens, as chat completions and completions have it."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.response_tokens,
        "total_tokens": answer.prompt_tokens + answer.response_tokens,
    }


def text_of(content: object, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of `content`: a string, null, or a list of text parts. Raises BadRequestError for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError(f"{where} must be a string or a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in kinds:
            raise BadRequestError(f"{where} has a part of type {kind!r}; this model takes text only")
        texts.append(string(part.get("text"), f"{where}.text"))
    return "".join(texts)


def string(value: object, where: str) -> str:
    """`value`, if it is a string. Raises BadRequestError."""
    if not isinstance(value, str):
        raise BadRequestError(f"{where} must be a string")
    return value


def mapping(value: object, where: str) -> dict[str, Any]:
    """`value`, if it is an object. Raises BadRequestError."""
    if not isinstance(value, dict):
        raise BadRequestError(f"{where} must be an object")
    return value


def sequence(value: object, where: str) -> list[Any]:
    """`value`, if it is a list; an absent one is empty. Raises BadRequestError."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequestError(f"{where} must be a list")
    return value


def positive(value: object, where: str) -> int | None:
    """`value`, if it is absent or a positive integer. Raises BadRequestError."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadRequestError(f"{where} must be a positive integer")
    return value


def refuse(body: Body, harmless: Mapping[str, tuple[object, ...]], where: str = "") -> None:
    """Raises BadRequestError for each field of `harmless` that is there with a value other than null and those listed."""
    for name, values in harmless.items():
        value = body.get(name)
        if value is not None and value not in values:
            raise BadRequestError(f"{f'{where}.' if where else ''}{name} is not supported with the value {json.dumps(value)[:200]}")


def texts(value: object, where: str) -> tuple[str, ...]:
    """`value` as texts: one, a list of them, or null; none may be empty. Raises BadRequestError."""
    given = [value] if isinstance(value, str) else sequence(value, where)
    found = tuple(string(text, where) for text in given)
    if "" in found:
        raise BadRequestError(f"{where} must not hold an empty text")
    return found


def named(names: Sequence[object], tools: Sequence[Tool], where: str) -> tuple[str, ...]:
    """`names`, if there are any and each is that of one of `tools`. Raises BadRequestError."""
    known = [tool["function"]["name"] for tool in tools]
    for name in names:
        if name not in known:
            raise BadRequestError(
                f"{where} names {json.dumps(name)[:200]}, which is not among the tools: {', '.join(known) or 'there are none'}"
            )
    if not names:
        raise BadRequestError(f"{where} asks for a call, but there are no tools")
    return tuple(str(name) for name in names)


def every(tools: Sequence[Tool]) -> list[str]:
    """The names of `tools`."""
    return [tool["function"]["name"] for tool in tools]


def function_tool(name: str, spec: Mapping[str, Any], where: str) -> Tool:
    """A tool in canonical form."""
    parameters = spec.get("parameters")
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": string(spec.get("description") or "", f"{where}.description"),
            "parameters": mapping(parameters, f"{where}.parameters") if parameters is not None else {},
        },
    }


def tool_call(call_id: object, name: str, arguments: object, where: str) -> dict[str, Any]:
    """A tool call in canonical form."""
    return {
        "id": string(call_id, f"{where} id"),
        "type": "function",
        "function": {"name": name, "arguments": string(arguments if arguments is not None else "{}", f"{where} arguments")},
    }


def not_empty(messages: list[Message], where: str) -> list[Message]:
    """`messages`, if there are any. Raises BadRequestError."""
    if not messages:
        raise BadRequestError(f"{where} must not be empty")
    return messages
