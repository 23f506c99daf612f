"""What the installed Codex sends and reads back, in the proxy's canonical form: run it once against a server that answers by script.

The tokenizer is trained on this, so that another version of Codex gets a tokenizer of its own.
"""

import json
import os
import subprocess
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from activities.harnesses.base import HarnessContext
from activities.harnesses.codex import MOUNT, Codex, CodexOptions
from proxy.dialects.responses import Responses


class _Script(BaseHTTPRequestHandler):
    """Answers the first request with a command, the next with a closing message."""

    requests: list[tuple[dict[str, Any], dict[str, str]]]
    answer: str

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.requests.append((body, {key.lower(): value for key, value in self.headers.items()}))
        number = len(self.requests)
        arguments = json.dumps({"cmd": self.answer})
        call = {"type": "function_call", "id": "fc1", "call_id": "call1", "name": "exec_command", "arguments": arguments}
        message = {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]}
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2, "input_tokens_details": None, "output_tokens_details": None}
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for kind, fields in (
            ("response.created", {"response": {"id": f"r{number}"}}),
            ("response.output_item.done", {"output_index": 0, "item": call if number == 1 else message}),
            ("response.completed", {"response": {"id": f"r{number}", "usage": usage}}),
        ):
            self.wfile.write(f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode())


def capture(options: CodexOptions, instruction: str, files: dict[str, str], command: str) -> dict[str, Any]:
    """{messages, tools} of Codex's second request: the question, the call, and the output as Codex reports it.

    Raises RuntimeError if Codex did not come that far.
    """
    _Script.requests, _Script.answer = [], command
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Script)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with tempfile.TemporaryDirectory() as name:
            work = Path(name) / "work"
            work.mkdir()
            for file, text in files.items():
                (work / file).write_text(text)
            codex = Codex(options)
            context = HarnessContext(
                instruction=instruction,
                workdir=str(work),
                home=name,
                api_key=SecretStr("none"),
                base_url=f"http://127.0.0.1:{server.server_port}",
            )
            for path, content in codex.files(context).items():
                assert isinstance(content, bytes)
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_bytes(content)
            binary = codex.read_only()[MOUNT] / "bin" / "codex"
            done = subprocess.run(
                [str(binary), *codex.command(context)[1:]],
                env={**codex.env(context), "PATH": os.environ["PATH"], "HOME": name},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
    finally:
        server.shutdown()
    if len(_Script.requests) != 2:
        raise RuntimeError(f"Codex made {len(_Script.requests)} requests where 2 were expected: {done.stderr[-1000:]}")
    question = Responses().parse(*_Script.requests[1])
    return {"messages": question.messages, "tools": question.tools}
