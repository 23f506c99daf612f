"""The canonical form of a question: what every dialect is parsed into, and how two messages are compared.

A message is a chat-completions message with these keys and no others: `role` (system, user, assistant, tool), `content` (a
string), and where they apply `reasoning_content`, `tool_calls` [{id, type, function: {name, arguments: JSON text}}],
`tool_call_id`. A tool is {type: function, function: {name, description, parameters}}. A raw prompt is one message with the role
`prompt`, whose content may be a list of token ids.

While an answer is sampled, its message grows: content, reasoning and arguments get longer, calls are added (`extends`).

Two messages are the same when a harness may have made one of them out of the other by echoing it: arguments are compared
parsed, `null` content equals the empty string, reasoning does not count, a call is known by its place in its answer. Where a dialect
knows no JSON text, the echo wraps it: {"input": text} for a custom tool, {"arguments": text} for a text that is no object. Such an
object is the same as its text.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

from contracts.sessions import CallKind

RAW: Final = "prompt"

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
_SURROGATE_BYTES = re.compile(rb"\\u[dD][89a-fA-F]")
Message = dict[str, Any]
Tool = dict[str, Any]


def loads(text: str | bytes) -> Any:
    """A JSON value. Half a surrogate pair, as JavaScript leaves where it cuts a text, becomes U+FFFD: no tokenizer, file or wire takes it.

    Raises ValueError or RecursionError.
    """
    value = json.loads(text)
    found = _SURROGATE_BYTES.search(text) if isinstance(text, bytes) else _SURROGATE.search(text)
    return _mended(value) if found else value


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_mended(inner) for inner in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(inner) for key, inner in value.items()}
    return value


def digest(value: object) -> str:
    """Hex digest of a JSON value, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def by_place(messages: Iterable[Message], answered: Message | None = None) -> list[Message]:
    """A conversation in which each tool's message names its call by the call's place in the answer before. Some harnesses rename ids.

    `answered` is the assistant's message before the conversation, if there is one.
    """
    placed, places = list[Message](), _places(answered)
    for message in messages:
        if message["role"] == "tool":
            call_id = _call_id(message["tool_call_id"])
            message = {**message, "tool_call_id": places.get(call_id, call_id)}
        elif message["role"] == "assistant":
            places = _places(message)
        placed.append(message)
    return placed


def with_ids_of(answer: Message, echo: Message, messages: Iterable[Message]) -> list[Message]:
    """The messages after `echo` with the ids of `answer`, of which it is the echo."""
    own = [call["id"] for call in answer.get("tool_calls") or []]
    places = {_call_id(call["id"]): place for place, call in enumerate(echo.get("tool_calls") or [])}
    named = list[Message]()
    for message in messages:
        place = places.get(_call_id(message["tool_call_id"])) if message["role"] == "tool" else None
        named.append(message if place is None else {**message, "tool_call_id": own[place]})
    return named


def message_keys(messages: Iterable[Message], answered: Message | None = None) -> list[str]:
    """`message_key` of each message of a conversation, `by_place`."""
    return [message_key(message) for message in by_place(messages, answered)]


def message_key(message: Message) -> str:
    """Equal for two messages exactly when they are the same message in the sense of this module."""
    role, content = message["role"], message.get("content") or ""
    if role == "assistant":
        calls = [[call["function"]["name"], _arguments(call["function"]["arguments"])] for call in message.get("tool_calls") or []]
        return digest([role, content.strip(), calls])
    return digest([role, content, message.get("tool_call_id")])


def _places(message: Message | None) -> dict[str, str]:
    calls = message.get("tool_calls") or [] if message else []
    return {_call_id(call["id"]): f"call {place}" for place, call in enumerate(calls)}


def _call_id(call_id: str) -> str:
    return "".join(filter(str.isalnum, call_id))


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object, for dialects that know no other; a text that is none is given as {"arguments": text}."""
    try:
        value = loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _arguments(text: str) -> object:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()
    if isinstance(value, dict) and len(value) == 1:
        wrapped = value.get("input", value.get("arguments"))
        if isinstance(wrapped, str):
            return _arguments(wrapped)
    return value


def assistant(content: str, reasoning: str, calls: Sequence[tuple[str, str, str]]) -> Message:
    """An assistant message. `calls` are (id, name, arguments as text)."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}} for call_id, name, arguments in calls
        ]
    return message


def extends(message: Message, earlier: Message) -> bool:
    """Whether the assistant's `message` begins with all that `earlier` says."""
    calls, before = message.get("tool_calls", []), earlier.get("tool_calls", [])
    return (
        message["content"].startswith(earlier["content"])
        and message.get("reasoning_content", "").startswith(earlier.get("reasoning_content", ""))
        and len(calls) >= len(before)
        and all(
            (now["id"], now["function"]["name"]) == (then["id"], then["function"]["name"])
            and now["function"]["arguments"].startswith(then["function"]["arguments"])
            for now, then in zip(calls, before, strict=False)
        )
    )


def chain(keys: Iterable[str], start: str = "") -> list[str]:
    """Digest of each prefix of a history: entry n stands for the first n + 1 messages."""
    links = []
    for key in keys:
        start = hashlib.sha256(f"{start}{key}".encode()).hexdigest()
        links.append(start)
    return links


class WireTool(NamedTuple):
    """How a dialect knows a tool: what it is there (`function`, `custom`, `tool_search`), its namespace or "", its name."""

    kind: str
    namespace: str
    name: str


@dataclass(frozen=True)
class Question:
    """One model request, in canonical form.

    `window` counts the harness's context windows where it says so: a higher number than before means that it compacted.
    `names` leads from a tool's canonical name to what the dialect calls it, where the two may differ. `compact` means that the
    answer is a summary, which the dialect gives in its own form.

    The rest is enforced while the answer is sampled: it calls one of the tools named in `must_call`, if there are any; it has at most one
    call (`one_call`); it is JSON of the JSON schema `schema`, unless it calls a tool; its content ends before the first text of `stop`.
    """

    dialect: str
    model: str
    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = True
    kind: CallKind = CallKind.TURN
    window: int = 0
    names: dict[str, WireTool] = field(default_factory=dict)
    compact: bool = False
    must_call: tuple[str, ...] = ()
    one_call: bool = False
    schema: dict[str, Any] | None = None
    stop: tuple[str, ...] = ()

    @property
    def raw(self) -> bool:
        """Whether the prompt goes to the model as it is, and the answer comes back so: no template, no tools, no thoughts."""
        return bool(self.messages[0]["role"] == RAW)

    @cached_property
    def keys(self) -> list[str]:
        """`message_key` of each message."""
        return message_keys(self.messages)

    @cached_property
    def links(self) -> list[str]:
        """`chain` of the messages."""
        return chain(self.keys)

    @cached_property
    def tools_key(self) -> str:
        """Equal for equal lists of tools."""
        return digest(self.tools)

    @cached_property
    def terms(self) -> str:
        """Equal for two requests that ask in the same way, whatever their messages and tools."""
        form = [self.must_call, self.one_call, self.schema, self.stop]
        return digest([self.dialect, self.max_tokens, self.kind.value, self.window, form])

    @cached_property
    def digest(self) -> str:
        """Equal for a request and its retry. Whether the answer is streamed is not part of the question."""
        return digest([self.terms, self.keys, self.tools_key])


@dataclass(frozen=True)
class Answer:
    """A finished call, as a dialect needs it to make a reply. The same call makes the same reply, byte for byte."""

    session_id: str
    sequence: int
    message: Message
    finish_reason: str
    prompt_tokens: int
    response_tokens: int
    created: int
    stop_sequence: str | None = None

    @property
    def identity(self) -> str:
        """`identity` of the call."""
        return identity(self.session_id, self.sequence)


def identity(session_id: str, *place: int) -> str:
    """Names a call, or a part of one, in ids of replies: unique, and free of characters that harnesses strip."""
    return digest([session_id, *place])[:24]
