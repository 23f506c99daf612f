"""Messages to tokens and back, by `renderers`: chat templates as programs, one for each model family.

The choice of configuration matters for token-exactness. `thinking_retention="all"` lets a next turn extend the sampled tokens
across a new user message too; with the template's own rule the thoughts of earlier turns would be cut out there, which
changes the prefix and starts another segment. Thinking itself stays as the template has it (enabled: the prompt ends right
after the assistant's header, with nothing prefilled).
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from renderers import create_renderer
from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus, load_tokenizer
from renderers.configs import RendererConfig

from proxy.canonical import RAW, Message, Tool, loads
from proxy.constraints import CallForm, hermes
from proxy.errors import BadRequestError

RENDERER_OF_MODEL_TYPE: Final = {"qwen3": "qwen3", "qwen3_moe": "qwen3"}
_CALL_FORMS: Final = {"qwen3": hermes}
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
# A call as most families write it, as far as its arguments have begun. Those of other families are shown when they are whole.
_OPENED: Final = re.compile(r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?P<arguments>\{)')
_DECODER: Final = json.JSONDecoder()


@dataclass(frozen=True)
class Parsed:
    """A sampled answer. `calls` are (name, arguments) in order, the arguments as the model wrote them: JSON text, unless the model
    wrote something else or was cut off."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


class Rendering:
    """Renders prompts and parses answers for one tokenizer."""

    def __init__(self, tokenizer: Path, config: dict[str, Any] | None = None) -> None:
        """Load from a directory in Hugging Face format.

        Args:
            tokenizer: directory with tokenizer.json and, unless `config` names a renderer, config.json.
            config: renderer configuration ({"name": …}) in place of the one that the model type implies.

        Raises:
            ValueError: the directory or the configuration cannot be used.
        """
        if not (tokenizer / "tokenizer.json").is_file():
            raise ValueError(f"there is no tokenizer.json in {tokenizer}")
        settings = {"thinking_retention": "all", **(config or {"name": _renderer_for(tokenizer)})}
        adapter: TypeAdapter[Any] = TypeAdapter(RendererConfig)
        self._tokenizer = load_tokenizer(str(tokenizer))
        try:
            self._name = str(settings["name"])
            self._renderer = create_renderer(self._tokenizer, adapter.validate_python(settings))
        except ValidationError as error:
            reasons = "; ".join(str(problem["msg"]) for problem in error.errors())
            raise ValueError(f"the renderer configuration {settings} cannot be used: {reasons}") from error

    @cached_property
    def call_form(self) -> CallForm | None:
        """How the model writes a call; none if that is not known."""
        form = _CALL_FORMS.get(self._name)
        return form(self._tokenizer.convert_tokens_to_ids) if form else None

    def stop_token_ids(self, *, one_call: bool) -> list[int]:
        """Tokens that end an answer; with `one_call` the end of a call, too. Raises BadRequestError if the form of calls is not known."""
        ids = list(self._renderer.get_stop_token_ids())
        if one_call:
            if not self.call_form:
                raise BadRequestError("a single tool call cannot be enforced for this model: the form of its calls is not known")
            ids.append(self.call_form.end[1])
        return ids

    def prompt(self, messages: list[Message], tools: list[Tool]) -> list[int]:
        """Render a whole prompt. Raises BadRequestError if the model's template has no form for it."""
        if messages[0]["role"] == RAW:
            return self._raw(messages[0]["content"])
        try:
            return list(self._renderer.render_ids(_plain(messages), tools=tools or None, add_generation_prompt=True))
        except (ValueError, KeyError, TypeError) as error:
            raise BadRequestError(f"the conversation cannot be rendered for this model: {error}") from error

    def _raw(self, prompt: str | list[int]) -> list[int]:
        """Tokens of a prompt without a template."""
        if isinstance(prompt, str):
            return list(self._tokenizer.encode(prompt))
        if unknown := [token for token in prompt if not 0 <= token < len(self._tokenizer)]:
            raise BadRequestError(f"prompt has the token {unknown[0]}; this model has tokens 0 to {len(self._tokenizer) - 1}")
        return prompt

    def text(self, ids: list[int]) -> str:
        """Sampled tokens as text, without half a character or those that end an answer."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)).rstrip(_REPLACEMENT)

    def extend(self, prompt_ids: list[int], response_ids: list[int], new: list[Message], tools: list[Tool]) -> list[int] | None:
        """The next prompt: the recorded tokens, then `new`. None if the model's format does not allow it here."""
        try:
            rendered = self._renderer.bridge_to_next_turn(prompt_ids, response_ids, _plain(new), tools=tools or None)
        except (ValueError, KeyError, TypeError) as error:
            raise BadRequestError(f"the conversation cannot be rendered for this model: {error}") from error
        if rendered is None:
            return None
        ids, recorded = list(rendered.token_ids), prompt_ids + response_ids
        return ids if ids[: len(recorded)] == recorded else None

    def parse(self, prompt_ids: list[int], response_ids: list[int], tools: list[Tool]) -> Parsed:
        """Parse a finished answer. A call without a name is text, as the model wrote it, if the answer has no other call."""
        parsed = self._parse(prompt_ids, response_ids, tools)
        calls = [call for attempt in parsed.tool_calls if (call := _call(attempt))]
        malformed = [] if calls else [attempt.raw for attempt in parsed.tool_calls]
        content = "\n".join(filter(None, [parsed.content, *malformed]))
        return Parsed(content.strip(), (parsed.reasoning_content or "").strip(), calls)

    def partial(self, prompt_ids: list[int], response_ids: list[int], tools: list[Tool]) -> Parsed:
        """What can be shown of an answer that goes on: the finished one begins with it. No half a character, no call without a name."""
        parsed = self._parse(prompt_ids, response_ids, tools)
        calls = [(name, arguments.rstrip(_REPLACEMENT)) for name, arguments in filter(None, map(_call, parsed.tool_calls))]
        return Parsed(_shown(parsed.content), _shown(parsed.reasoning_content or ""), calls)

    def _parse(self, prompt_ids: list[int], response_ids: list[int], tools: list[Tool]) -> ParsedResponse:
        try:
            return self._renderer.parse_response(response_ids, tools=tools or None, prompt_ids=prompt_ids)
        except RecursionError:  # thousands of brackets in a call
            return ParsedResponse(content=self._tokenizer.decode(response_ids))


def _renderer_for(tokenizer: Path) -> str:
    known = ", ".join(sorted(RENDERER_OF_MODEL_TYPE))
    try:
        model_type = json.loads((tokenizer / "config.json").read_text())["model_type"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{tokenizer} has no config.json with a model_type; name a renderer instead") from error
    if model_type not in RENDERER_OF_MODEL_TYPE:
        raise ValueError(f"no renderer is registered for model type {model_type!r} (known: {known}); name one instead")
    return RENDERER_OF_MODEL_TYPE[model_type]


def _call(attempt: ParsedToolCall) -> tuple[str, str] | None:
    """(name, arguments) of a call, also of one that is cut off or whose arguments are no JSON: the harness says what is wrong with it."""
    if found := _OPENED.match(attempt.raw):
        start = found.start("arguments")
        try:
            name = loads(found["name"])
        except ValueError:
            return None
        try:
            end = _DECODER.raw_decode(attempt.raw, start)[1]
        except (ValueError, RecursionError):
            end = len(attempt.raw)
        return (name, attempt.raw[start:end]) if name else None
    if attempt.status is ToolCallParseStatus.OK and attempt.name and isinstance(attempt.name, str):
        return attempt.name, _json(attempt.arguments)  # of a model that writes its calls in another form
    return None


def _shown(text: str) -> str:
    return text.rstrip(_REPLACEMENT).strip()


def _plain(messages: list[Message]) -> list[Any]:
    """Messages as renderers take them: arguments as objects where they are JSON, so that they render as the template says."""
    return [
        {**message, "tool_calls": [_parsed(call) for call in message["tool_calls"]]} if message.get("tool_calls") else message
        for message in messages
    ]


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = loads(function["arguments"])
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)
