"""What a harness does, without the harness: ask, read the stream, echo the answer."""

import json
from typing import Any

import httpx

TOOL = {
    "type": "function",
    "function": {
        "name": "exec_command",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
    },
}
FLAT_TOOL = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]


def text_of_call(name: str, **arguments: Any) -> str:
    """A tool call as Qwen3 writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def call_text(cmd: str, name: str = "exec_command") -> str:
    """A call that runs a command."""
    return text_of_call(name, cmd=cmd)


def thoughtful_agent(prompt: str) -> str:
    """A script for the StubEngine: thinks, says and calls something until it has seen two outputs, then says that it is done."""
    if prompt.count("<tool_response>") < 2:
        return "<think>\nlook\n</think>\n\nI look." + call_text(f"echo {prompt.count('<tool_response>')}")
    return "done"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Client:
    """A client with one session's key."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60)

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"model": "policy", "messages": messages, "tools": [TOOL], **fields})

    def responses(self, items: Any, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/responses", json={"model": "policy", "input": items, "tools": [FLAT_TOOL], **fields})

    def message(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        reply = self.chat(messages, **fields)
        assert reply.status_code == 200, reply.text
        message: dict[str, Any] = reply.json()["choices"][0]["message"]
        return message


def events(text: str) -> list[Any]:
    """The data of each server-sent event."""
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ") and line != "data: [DONE]"]
