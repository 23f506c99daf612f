"""Messages to tokens and back, by `renderers`: chat templates as programs, one for each model family.

The choice of configuration matters for token-exactness. `thinking_retention="all"` lets a next turn extend the sampled tokens
across a new user message too; with the template's own rule the thoughts of earlier turns would be cut out there, which
changes the prefix and starts another segment. Thinking itself stays as the template has it (enabled: the prompt ends right
after the assistant's header, with nothing prefilled).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from renderers import create_renderer
from renderers.base import ToolCallParseStatus, load_tokenizer
from renderers.configs import RendererConfig

from proxy.canonical import RAW, Message, Tool
from proxy.errors import BadRequestError

RENDERER_OF_MODEL_TYPE: Final = {"qwen3": "qwen3", "qwen3_moe": "qwen3"}
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Parsed:
    """A sampled answer. `calls` are (name, arguments as JSON text) in order; a malformed call is text, as the model wrote it."""

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
            self._renderer = create_renderer(self._tokenizer, adapter.validate_python(settings))
        except ValidationError as error:
            reasons = "; ".join(str(problem["msg"]) for problem in error.errors())
            raise ValueError(f"the renderer configuration {settings} cannot be used: {reasons}") from error

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end an answer."""
        return list(self._renderer.get_stop_token_ids())

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
        """Parse a finished answer."""
        parsed = self._renderer.parse_response(response_ids, tools=tools or None, prompt_ids=prompt_ids)
        good = [call for call in parsed.tool_calls if call.status is ToolCallParseStatus.OK and call.name]
        malformed = [call.raw for call in parsed.tool_calls if call not in good]
        return Parsed(
            content="\n".join(filter(None, [parsed.content, *malformed])),
            reasoning=parsed.reasoning_content or "",
            calls=[(_unicode(str(call.name)), _json(call.arguments)) for call in good],
        )

    def partial(self, prompt_ids: list[int], response_ids: list[int], tools: list[Tool]) -> tuple[str, str]:
        """(content, reasoning) of an answer that goes on: what can be shown already, without half a character."""
        parsed = self._renderer.parse_response(response_ids, tools=tools or None, prompt_ids=prompt_ids)
        return parsed.content.rstrip(_REPLACEMENT).rstrip(), (parsed.reasoning_content or "").rstrip(_REPLACEMENT).rstrip()


def _renderer_for(tokenizer: Path) -> str:
    known = ", ".join(sorted(RENDERER_OF_MODEL_TYPE))
    try:
        model_type = json.loads((tokenizer / "config.json").read_text())["model_type"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{tokenizer} has no config.json with a model_type; name a renderer instead") from error
    if model_type not in RENDERER_OF_MODEL_TYPE:
        raise ValueError(f"no renderer is registered for model type {model_type!r} (known: {known}); name one instead")
    return RENDERER_OF_MODEL_TYPE[model_type]


def _plain(messages: list[Message]) -> list[Any]:
    """Messages as renderers take them: arguments as objects where they are JSON, so that they render as the template says."""
    return [
        {**message, "tool_calls": [_parsed(call) for call in message["tool_calls"]]} if message.get("tool_calls") else message
        for message in messages
    ]


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _json(arguments: object) -> str:
    return _unicode(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _unicode(text: str) -> str:
    """Without lone surrogates, which a model can write in JSON and nobody can send."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
