"""What an answer must be like, in the form of the engine's guided decoding, and where its text ends.

Marks such as `<tool_call>` are asked for by their token: a model may spell them with other tokens, and what is so written is text.

The engine masks the tokens that would leave the form, so log-probabilities of such an answer are of the masked distribution. Thinking first
is allowed. A grammar begins with the answer: one that broke off cannot be continued under it (`proxy.sampling`).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from proxy.canonical import Question
from proxy.errors import BadRequestError

_LONGEST_BLANK: Final = 64  # blanks in a row; without a bound a model that begins to indent may never end

Mark = tuple[str, int]


@dataclass(frozen=True)
class CallForm:
    """How a model family writes a call: the mark `begin`, `opening`, the name as JSON, `middle`, the arguments as JSON, `closing`, the
    mark `end`. Thoughts stand between two marks. A mark is (text, token id)."""

    begin: Mark
    opening: str
    middle: str
    closing: str
    end: Mark
    thought: tuple[Mark, Mark]


def hermes(token: Callable[[str], int]) -> CallForm:
    """The form of Qwen3 and its kin; `token` gives a mark's id."""
    begin, end, *thought = ((mark, token(mark)) for mark in ("<tool_call>", "</tool_call>", "<think>", "</think>"))
    return CallForm(begin, '\n{"name": ', ', "arguments": ', "}\n", end, (thought[0], thought[1]))


def structured_outputs(question: Question, form: CallForm | None, max_tokens: int) -> dict[str, Any] | None:
    """vLLM's `structured_outputs` for `question`; none if its answer is free. Thinking may take half of `max_tokens`.

    Raises BadRequestError if a call must be forced and `form`, the model's, is not known.
    """
    if question.schema is None and not question.must_call:
        return None
    answers: list[dict[str, Any]] = []
    if question.schema is not None and not question.must_call:
        answers.append(_json(question.schema))
    if question.tools:
        if form is None:
            raise BadRequestError(
                "tool_choice and schemas beside tools cannot be enforced for this model: the form of its calls is not known"
            )
        named = [tool["function"] for tool in question.tools if tool["function"]["name"] in question.must_call or not question.must_call]
        answers.append(
            {
                "type": "tags_with_separator",
                "tags": [_tag(function["name"], function["parameters"], form) for function in named],
                "separator": "\n",
                "at_least_one": True,
                "stop_after_first": question.one_call,
            }
        )
    answer = answers[0] if len(answers) == 1 else {"type": "or", "elements": answers}
    thought = [_thought(form, max_tokens // 2)] if form else []
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [*thought, answer]}}
    return {"structural_tag": json.dumps(tag, ensure_ascii=False)}


def _tag(name: str, parameters: dict[str, Any], form: CallForm) -> dict[str, Any]:
    opening = form.opening + json.dumps(name, ensure_ascii=False) + form.middle
    parts = [_text(opening), _json({"type": "object"} | parameters), _text(form.closing)]
    return {"type": "tag", "begin": _token(form.begin), "content": {"type": "sequence", "elements": parts}, "end": _token(form.end)}


def _token(mark: Mark) -> dict[str, Any]:
    return {"type": "token", "token": mark[1]}


def _text(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _LONGEST_BLANK}


def _thought(form: CallForm, max_tokens: int) -> dict[str, Any]:
    begin, end = form.thought
    text = {"type": "any_text", "excludes": [mark for mark, _ in (form.begin, form.end, begin, end)], "max_tokens": max_tokens}
    thought = {"type": "tag", "begin": _token(begin), "content": text, "end": _token(end)}
    return {"type": "optional", "content": {"type": "sequence", "elements": [thought, {"type": "regex", "pattern": "[ \\n]{0,4}"}]}}


def until_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """`text` up to the first of the texts in `stop`, and which one that was."""
    places = [(place, word) for word in stop if (place := text.find(word)) >= 0]
    if not places:
        return text, None
    place, word = min(places)
    return text[:place], word


def before_stop(text: str, stop: Sequence[str]) -> str:
    """What can be shown of a text that goes on: nothing that may turn out to be the beginning of a text in `stop`."""
    shown = until_stop(text, stop)[0]
    held = max((length for word in stop for length in range(1, len(word)) if shown.endswith(word[:length])), default=0)
    return shown[: len(shown) - held]
