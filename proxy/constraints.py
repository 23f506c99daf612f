"""What an answer must be like, in the form of the engine's guided decoding, and where its text ends.

The engine masks the tokens that would leave the form, so log-probabilities of such an answer are of the masked distribution. Thinking first
is allowed. A grammar begins with the answer: one that broke off cannot be continued under it (`proxy.sampling`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from proxy.canonical import Question
from proxy.errors import BadRequestError

_LONGEST_BLANK: Final = 64  # blanks in a row; without a bound a model that begins to indent may never end


@dataclass(frozen=True)
class CallForm:
    """How a model family writes a call: `begin`, the name as JSON, `middle`, the arguments as JSON, `end`. `end_token` ends it alone."""

    begin: str
    middle: str
    end: str
    end_token: str


HERMES: Final = CallForm('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "</tool_call>")


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
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [_thought(max_tokens // 2), answer]}}
    return {"structural_tag": json.dumps(tag, ensure_ascii=False)}


def _tag(name: str, parameters: dict[str, Any], form: CallForm) -> dict[str, Any]:
    begin = form.begin + json.dumps(name, ensure_ascii=False) + form.middle
    return {"type": "tag", "begin": begin, "content": _json({"type": "object"} | parameters), "end": form.end}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _LONGEST_BLANK}


def _thought(max_tokens: int) -> dict[str, Any]:
    text = {"type": "any_text", "max_tokens": max_tokens}
    thought = {"type": "tag", "begin": "<think>", "content": text, "end": "</think>"}
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
