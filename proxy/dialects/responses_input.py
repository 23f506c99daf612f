"""What a Responses request says, in canonical form: its tools, its items, and whether it asks for a compaction.

Whatever a model can only say in JSON becomes a function, and is taken apart again in the reply: a tool of a namespace gets a
canonical name of its own, a custom tool is a function of one string, `tool_search` a function like any other. Tools that a
search found are text where they were found, so the prompt goes on token by token.

A compaction is stateless too: its item carries the summary, encoded but not encrypted.
"""

import base64
import json
import re
from typing import Any, Final

from proxy.canonical import Message, Tool, WireTool, loads
from proxy.dialects import base
from proxy.errors import BadRequestError

_TEXT_PARTS: Final = ("input_text", "output_text", "text", "refusal")
_ROLES: Final = {"system": "system", "developer": "system", "user": "user"}
_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output")
_COMPACTIONS: Final = ("compaction", "compaction_summary", "context_compaction")
_SEARCH: Final = "tool_search"
_INPUT: Final = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False}

# The text of {"input": text} as far as it has come: whole escapes, and no first half of a pair before what follows it is known.
_UNIT: Final = r"(?:[^\\]|\\[^u]|\\u[0-9a-fA-F]{4})"
_INPUT_BEGUN: Final = re.compile(rf'\s*\{{\s*"input"\s*:\s*"((?:(?!"|\\u[dD][89abAB]){_UNIT}|\\u[dD][89abAB][0-9a-fA-F]{{2}}(?={_UNIT}))*)')

SUMMARISE: Final = (
    "The conversation so far will be replaced by a summary of it. Write that summary now, as text, without calling a tool: what was "
    "asked for, what has been done and found out, what was decided and why, and what is left to do. Keep every name, path and number "
    "that is needed to go on."
)
SUMMARISED: Final = "Summary of the conversation so far, which it replaces:\n\n"


class Input:
    """What a request's `instructions`, `tools` and `input` say. `compactions` counts those that the conversation has been through.

    Raises BadRequestError, naming the place, for whatever has no meaning for this model.
    """

    def __init__(self, body: base.Body) -> None:
        self.messages: list[Message] = []
        self.names: dict[str, WireTool] = {}
        self.tools: list[Tool] = self._define(body.get("tools"), "tools")
        self.compact = False
        self.compactions = 0
        if instructions := body.get("instructions"):
            self.messages.append({"role": "system", "content": base.string(instructions, "instructions")})
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else base.sequence(given, "input")
        for index, item in enumerate(items):
            if self.compact:
                raise BadRequestError(f"input[{index}] comes after a compaction_trigger, which must be the last item")
            self._take(base.mapping(item, f"input[{index}]"), f"input[{index}]")

    def _define(self, tools: object, where: str, namespace: str = "") -> list[Tool]:
        """`tools` in canonical form; remembers what the dialect calls them."""
        defined: list[Tool] = []
        for index, item in enumerate(base.sequence(tools, where)):
            place = f"{where}[{index}]"
            tool = base.mapping(item, place)
            kind = tool.get("type")
            if kind == "namespace" and not namespace:
                defined += self._define(tool.get("tools"), f"{place}.tools", base.string(tool.get("name"), f"{place}.name"))
                continue
            if kind == _SEARCH:
                if tool.get("execution") != "client":
                    raise BadRequestError(f"{place} searches at the provider; only execution 'client' is supported")
                wire = WireTool(_SEARCH, "", _SEARCH)
            elif kind in ("function", "custom"):
                wire = WireTool(kind, namespace, base.string(tool.get("name"), f"{place}.name"))
            else:
                raise BadRequestError(f"{place} is of type {kind!r}; supported are function, custom, namespace and tool_search")
            name = _canonical_name(wire.namespace, wire.name)
            if self.names.setdefault(name, wire) != wire:
                raise BadRequestError(f"{place} and another tool would both be called {name!r}")
            defined.append(base.function_tool(name, _custom(tool, place) if kind == "custom" else tool, place))
        return defined

    def _take(self, item: dict[str, Any], where: str) -> None:
        """Add one item. Reasoning, text and calls of one answer are one message, as they were sampled."""
        kind = item.get("type", "message")
        if kind == "reasoning":
            parts = base.sequence(item.get("content") or item.get("summary"), f"{where}.content")
            text = base.text_of(parts, f"{where}.content", ("reasoning_text", "summary_text", "text"))
            self._assistant(after=()).update({"reasoning_content": text} if text else {})
        elif kind == "message" and item.get("role") == "assistant":
            text = base.text_of(item.get("content"), f"{where}.content", _TEXT_PARTS)
            self._assistant(after=("tool_calls",))["content"] += text
        elif kind == "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise BadRequestError(f"{where}.role is {item.get('role')!r}; it must be system, developer, user or assistant")
            self.messages.append({"role": role, "content": base.text_of(item.get("content"), f"{where}.content", _TEXT_PARTS)})
        elif kind == "function_call":
            self._call(item, where, item.get("arguments"))
        elif kind == "custom_tool_call":
            self._call(item, where, json.dumps({"input": base.string(item.get("input"), f"{where}.input")}, ensure_ascii=False))
        elif kind == "tool_search_call":
            arguments = base.mapping(item.get("arguments"), f"{where}.arguments")
            self._call({**item, "name": _SEARCH}, where, json.dumps(arguments, ensure_ascii=False))
        elif kind in _OUTPUTS:
            self._output(item, where, base.text_of(item.get("output"), f"{where}.output", _TEXT_PARTS))
        elif kind == "tool_search_output":
            found = self._define(item.get("tools"), f"{where}.tools")
            self._output(item, where, json.dumps(found, ensure_ascii=False))
        elif kind == "additional_tools":
            self.tools += self._define(item.get("tools"), f"{where}.tools")
        elif kind == "agent_message":
            self.messages.append({"role": "user", "content": _agent_message(item, where)})
        elif kind == "compaction_trigger":
            self.messages.append({"role": "user", "content": SUMMARISE})
            self.compact = True
        elif kind in _COMPACTIONS:
            summary, compactions = decode_summary(item.get("encrypted_content"), f"{where}.encrypted_content")
            self.messages.append({"role": "user", "content": SUMMARISED + summary})
            self.compactions = max(self.compactions, compactions)
        elif kind != "configuration_update":  # which changes what the run decides: how much is thought, how much is said
            raise BadRequestError(f"{where} is of type {kind!r}, which is not supported")

    def _assistant(self, after: tuple[str, ...]) -> Message:
        """The assistant message that the next part belongs to: a new one after anything else, or if the last has `after`."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or any(key in self.messages[-1] for key in after):
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _call(self, item: dict[str, Any], where: str, arguments: object) -> None:
        namespace = base.string(item.get("namespace") or "", f"{where}.namespace")
        name = _canonical_name(namespace, base.string(item.get("name"), f"{where}.name"))
        call = base.tool_call(item.get("call_id"), name, arguments, where)
        self._assistant(after=()).setdefault("tool_calls", []).append(call)

    def _output(self, item: dict[str, Any], where: str, content: str) -> None:
        call_id = base.string(item.get("call_id"), f"{where}.call_id")
        self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})


def custom_input(arguments: str) -> str:
    """What a custom tool is given: the text of {"input": text}, or all of the arguments where they are anything else."""
    try:
        value = loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments


def growing_input(arguments: str) -> str:
    """What can be shown of `custom_input` while the arguments are still sampled: whole characters only."""
    found = _INPUT_BEGUN.match(arguments)
    if not found:
        return ""
    try:
        return str(loads(f'"{found[1]}"'))
    except ValueError:
        return ""


def encode_summary(summary: str, compactions: int) -> str:
    """A compaction item's `encrypted_content`; `compactions` counts those so far, this one included."""
    text = json.dumps({"summary": summary, "compactions": compactions}, ensure_ascii=False)
    return base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def decode_summary(content: object, where: str) -> tuple[str, int]:
    """(summary, compactions) of an item that `encode_summary` made. Raises BadRequestError for any other."""
    try:
        text = base64.b64decode(base.string(content, where), validate=True).decode("utf-8", "surrogatepass")
        value = json.loads(text)
        summary, compactions = value["summary"], value["compactions"]
        if not isinstance(summary, str) or not isinstance(compactions, int) or not 0 <= compactions < 2**31:
            raise ValueError(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadRequestError(f"{where} was not made by this proxy, so it cannot be read") from error
    return summary, compactions


def _canonical_name(namespace: str, name: str) -> str:
    return namespace + name if not namespace or namespace.endswith("__") else f"{namespace}__{name}"


def _custom(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A custom tool as a function. Its grammar is told to the model, not enforced."""
    description = base.string(tool.get("description") or "", f"{where}.description")
    form = base.mapping(tool.get("format") or {"type": "text"}, f"{where}.format")
    if form.get("type") == "grammar":
        syntax = base.string(form.get("syntax"), f"{where}.format.syntax")
        definition = base.string(form.get("definition"), f"{where}.format.definition")
        description = f"{description}\n\nIts input follows this {syntax} grammar:\n{definition}".strip()
    elif form.get("type") != "text":
        raise BadRequestError(f"{where}.format is of type {form.get('type')!r}; it must be text or grammar")
    return {"description": description, "parameters": _INPUT}


def _agent_message(item: dict[str, Any], where: str) -> str:
    """What one of Codex's agents tells another. A part that a provider would encrypt is what the model wrote."""
    parts = [
        {**part, "type": "text", "text": part.get("encrypted_content")}
        if isinstance(part, dict) and part.get("type") == "encrypted_content"
        else part
        for part in base.sequence(item.get("content"), f"{where}.content")
    ]
    return base.text_of(parts, f"{where}.content", _TEXT_PARTS)
