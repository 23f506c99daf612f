"""StubEngine: vLLM's token interface, answering from a script. For what a random model cannot do on cue: call a tool, break off."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

Script = Callable[[str], str]


class StubEngine:
    """An engine whose answers are texts. `script` gets the prompt as text and returns the answer as text.

    `troubles` are met one a request: "503", "cut" (the stream ends after two tokens), "abort" (it is aborted after two tokens,
    as by a weight update; `label_after_abort` is the label from then on), "late cut" (the stream ends before its last token, but not
    while `gate` is cleared). While `gate` is cleared, requests wait before their last
    token. `max_model_len` is what the engine says of itself.
    """

    def __init__(self, tokenizer: Path, script: Script, *, label: str = "run@0") -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self.script = script
        self.label = label
        self.label_after_abort = label
        self.troubles: list[str] = []
        self.prompts: list[list[int]] = []
        self.params: list[dict[str, Any]] = []
        self.probes = 0
        self.gate = threading.Event()
        self.gate.set()
        self.max_model_len = 100_000
        self.url = ""
        self._end = self.tokenizer.token_to_id("<|im_end|>")
        self._aborted: list[tuple[list[int], list[int]]] = []  # prompt and whole answer

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def answer_to(self, prompt: list[int]) -> list[int]:
        """What is left of the answer: a prompt may end in the tokens of an answer that was aborted."""
        for asked, answer in self._aborted:
            said = prompt[len(asked) :]
            if prompt[: len(asked)] == asked and said and answer[: len(said)] == said:
                return answer[len(said) :]
        return [*self.tokenizer.encode(self.script(self.text(prompt)), add_special_tokens=False).ids, self._end]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        trouble = self.troubles.pop(0) if self.troubles else ""
        if trouble == "503":
            return web.json_response({"error": {"message": "down", "type": "x", "param": None, "code": 503}}, status=503)
        self.prompts.append(body["token_ids"])
        self.params.append(body["sampling_params"])
        whole = self.answer_to(body["token_ids"])
        for word in body["sampling_params"].get("stop", []):
            whole = next((whole[:length] for length in range(len(whole)) if word in self.text(whole[:length])), whole)
        ids = whole[: body["sampling_params"]["max_tokens"]]
        finish = "stop" if ids == whole else "length"
        if trouble in ("abort", "late cut"):
            self._aborted.append((body["token_ids"], whole))
        if trouble in ("abort", "cut"):
            ids, finish = ids[:2], trouble
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        label = self.label
        for index, token in enumerate(ids):
            last = index == len(ids) - 1
            while last and not self.gate.is_set():
                await asyncio.sleep(0.01)
            if last and trouble in ("cut", "late cut"):
                raise ConnectionResetError
            choice = {
                "index": 0,
                "token_ids": [token],
                "logprobs": {"content": [{"token_id": token, "logprob": -0.001 * (token + 1)}]},
                "finish_reason": finish if last else None,
                "weight_versions": [{"version": label, "start": 0, "end": len(ids)}] if last else None,
            }
            await reply.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        await reply.write(b"data: [DONE]\n\n")
        if trouble == "abort":
            self.label = self.label_after_abort
        return reply

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "max_model_len": self.max_model_len}]})

    async def weight_info(self, _: web.Request) -> web.Response:
        self.probes += 1
        return web.json_response({"weight_version": self.label})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def serve(self, ready: "Future[str]", stopped: asyncio.Event) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/weight_info", self.weight_info)
        app.router.add_get("/health", self.health)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ready.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await stopped.wait()
        await runner.cleanup()


@contextmanager
def stub_engine(tokenizer: Path, script: Script, *, label: str = "run@0") -> Iterator[StubEngine]:
    """Serve a StubEngine from a thread until the block ends."""
    engine = StubEngine(tokenizer, script, label=label)
    ready: Future[str] = Future()
    loop = asyncio.new_event_loop()
    stopped = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(engine.serve(ready, stopped)), daemon=True)
    thread.start()
    try:
        engine.url = ready.result(10)
        yield engine
    finally:
        engine.gate.set()
        loop.call_soon_threadsafe(stopped.set)
        thread.join(10)
        loop.close()
