"""A stub of a Responses API on a unix socket: answers by script, so that a harness runs without an engine."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

Step = str | tuple[str, dict[str, Any]]


@asynccontextmanager
async def serve_script(socket: Path, script: Sequence[Step]) -> AsyncIterator[list[dict[str, Any]]]:
    """Serve one step a request: a text, or a (tool, arguments) call. Yields the list of {authorization, body} that were seen."""
    seen: list[dict[str, Any]] = []

    async def respond(request: web.Request) -> web.StreamResponse:
        step = script[len(seen)]
        seen.append({"authorization": request.headers.get("authorization"), "body": await request.json()})
        number = len(seen)
        if isinstance(step, str):
            item: dict[str, Any] = {"type": "message", "id": f"m{number}", "role": "assistant"}
            item["content"] = [{"type": "output_text", "text": step}]
        else:
            item = {
                "type": "function_call",
                "id": f"f{number}",
                "call_id": f"call{number}",
                "name": step[0],
                "arguments": json.dumps(step[1]),
            }
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2, "input_tokens_details": None, "output_tokens_details": None}
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for kind, fields in (
            ("response.created", {"response": {"id": f"r{number}"}}),
            ("response.output_item.done", {"output_index": 0, "item": item}),
            ("response.completed", {"response": {"id": f"r{number}", "usage": usage}}),
        ):
            await response.write(f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode())
        return response

    application = web.Application(client_max_size=2**24)
    application.router.add_post("/v1/responses", respond)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    try:
        yield seen
    finally:
        await runner.cleanup()
