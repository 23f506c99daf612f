"""`/v1/completions`, OpenAI's legacy route: a prompt as text or token ids goes to the model as it is, without a chat template.

What was said before is unknown here, so a prompt goes on from a call only if it begins with that call's very tokens.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from proxy.canonical import RAW, Answer, Message, Question
from proxy.dialects import base
from proxy.errors import BadRequestError, ProxyError

_HARMLESS: Final[dict[str, tuple[object, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "logit_bias": ({},),
    "logprobs": (),
    "n": (1,),
    "suffix": ("",),
}
_DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's


class Completions(base.Dialect):
    """OpenAI's completions."""

    name = "completions"
    paths: ClassVar[base.Paths] = {"/v1/completions": "answer"}

    def parse(self, body: base.Body, headers: Mapping[str, str]) -> Question:
        base.refuse(body, _HARMLESS)
        options = base.mapping(body.get("stream_options") or {}, "stream_options")
        max_tokens = base.positive(body.get("max_tokens"), "max_tokens")
        return Question(
            dialect=self.name,
            model=base.string(body.get("model") or "", "model"),
            messages=[{"role": RAW, "content": _prompt(body.get("prompt"))}],
            max_tokens=_DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
            stream=bool(body.get("stream")),
            include_usage=bool(options.get("include_usage")),
            stop=base.texts(body.get("stop"), "stop"),
        )

    def encode(self, question: Question, answer: Answer) -> dict[str, Any]:
        reply = _chunk(question, answer.identity, answer.created, answer.message["content"], answer.finish_reason)
        return {**reply, "usage": base.usage(answer)}

    def stream(self, question: Question, identity: str, created: int) -> base.Stream:
        return _Stream(question, identity, created)


class _Stream(base.Stream):
    def __init__(self, question: Question, identity: str, created: int) -> None:
        self._question = question
        self._identity = identity
        self._created = created
        self._shown = ""

    def start(self) -> bytes:
        return b""

    def show(self, message: Message) -> bytes:
        delta, self._shown = message["content"][len(self._shown) :], message["content"]
        return self._chunk(delta) if delta else b""

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def end(self, answer: Answer) -> bytes:
        parts = self.show(answer.message) + self._chunk("", answer.finish_reason)
        if self._question.include_usage:
            last = _chunk(self._question, self._identity, self._created, "", None)
            parts += base.event({**last, "choices": [], "usage": base.usage(answer)})
        return parts + base.event("[DONE]")

    def fail(self, error: ProxyError) -> bytes:
        return base.event(base.openai_error(error))

    def _chunk(self, text: str, finish_reason: str | None = None) -> bytes:
        return base.event(_chunk(self._question, self._identity, self._created, text, finish_reason))


def _chunk(question: Question, identity: str, created: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {
        "id": f"cmpl-{identity}",
        "object": "text_completion",
        "created": created,
        "model": question.model,
        "choices": [{"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}],
    }


def _prompt(given: object) -> str | list[int]:
    """The one prompt: a text or token ids, alone or as the only entry of a list."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(isinstance(token, int) and not isinstance(token, bool) for token in given):
        return given
    if isinstance(given, list) and len(given) > 1 and all(isinstance(entry, str | list) for entry in given):
        raise BadRequestError(f"prompt holds {len(given)} prompts; only one is supported")
    raise BadRequestError("prompt must be a text or a list of token ids, and not empty")
