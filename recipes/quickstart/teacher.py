"""A scripted teacher behind vLLM's token interface: `teacher.py --model DIR --port P`. It demonstrates, and it is often wrong.

It reads the question out of the prompt's tokens, as a person would, and answers with the right command one time in four; otherwise
with one of the mistakes below. Having seen the command's output it says that it is done. It knows no answers: those are in files that
only a command can read.

Log-probabilities are those of its own choice: the log-probability of the chosen command stands on the command's first token, and 0 on
the others, so that a call's sum is the log-probability of what it did.
"""

import argparse
import json
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from lookup import KINDS, QUESTIONS, WORDINGS, Kind, solution
from transformers import PreTrainedTokenizerFast

RIGHT = 0.25
MISTAKES = {"no redirect": 0.92, "wrong field": 0.05, "wrong file": 0.03}
FINAL = "Done."

_ASKED = [
    re.compile(
        "^"
        + re.escape(wording)
        .replace(r"\{file\}", "(?P<file>.+?)")
        .replace(r"\{column\}", "(?P<column>.+?)")
        .replace(r"\{name\}", "(?P<name>.+?)")
        + "$"
    )
    for wording in WORDINGS
]


def understand(instruction: str) -> tuple[Kind, int, str]:
    """(kind, column, name) that an instruction asks for. Raises ValueError if it is none of the known wordings."""
    for pattern in _ASKED:
        if match := pattern.match(instruction.strip()):
            kind = next((kind for kind in KINDS if kind.file == match["file"]), None)
            if kind and match["column"] in kind.columns:
                return kind, kind.columns.index(match["column"]), match["name"]
    raise ValueError(f"the teacher does not know what to do with {instruction[:200]!r}")


def choose(instruction: str, draw: random.Random) -> tuple[str, float]:
    """(command, log-probability of choosing it)."""
    kind, column, name = understand(instruction)
    if draw.random() < RIGHT:
        return solution(kind.file, name, column), math.log(RIGHT)
    (mistake,) = draw.choices(list(MISTAKES), list(MISTAKES.values()))
    chance = (1 - RIGHT) * MISTAKES[mistake]
    if mistake == "no redirect":
        return solution(kind.file, name, column).removesuffix(" > answer.txt"), math.log(chance)
    others = [(k, c) for k, c in QUESTIONS if (k.file == kind.file) == (mistake == "wrong field") and (k, c) != (kind, column)]
    if not others:  # a file with one field: take the name itself
        return f"grep '^{name}=' {kind.file} | cut -d= -f1 > answer.txt", math.log(chance)
    other, wrong = draw.choice(others)
    return solution(other.file, name, wrong), math.log(chance / len(others))


def answer(prompt: str, draw: random.Random) -> tuple[str, float]:
    """(assistant text, log-probability) for a decoded prompt."""
    turns = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    if "<tool_response>" in turns[-1]:
        return FINAL, 0.0
    command, logprob = choose(turns[-1], draw)
    call = json.dumps({"name": "exec_command", "arguments": {"cmd": command}}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>", logprob


def create_app(tokenizer: PreTrainedTokenizerFast, max_model_len: int) -> FastAPI:
    """The routes that the proxy calls; docs/proxy.md has their format."""
    app = FastAPI(title="Scripted teacher")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    @app.get("/health")
    def health() -> dict[str, str]:
        return {}

    @app.get("/weight_info")
    def weight_info() -> dict[str, str]:
        return {"weight_version": "teacher@0"}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "teacher", "max_model_len": max_model_len}]}

    @app.post("/inference/v1/generate")
    def generate(request: dict[str, Any]) -> StreamingResponse:
        prompt = tokenizer.decode(request["token_ids"], skip_special_tokens=False)
        draw = random.Random(request.get("request_id") or prompt)
        text, logprob = answer(prompt, draw)
        ids = [*tokenizer.encode(text, add_special_tokens=False), end]
        limit = request["sampling_params"]["max_tokens"]
        finish = "stop" if len(ids) <= limit else "length"
        return StreamingResponse(_stream(ids[:limit], logprob, finish), media_type="text/event-stream")

    return app


def _stream(ids: list[int], logprob: float, finish: str) -> Iterator[str]:
    content = [{"token_id": token, "logprob": 0.0 if place else logprob} for place, token in enumerate(ids)]
    choice = {
        "index": 0,
        "finish_reason": finish,
        "token_ids": ids,
        "logprobs": {"content": content},
        "weight_versions": [{"version": "teacher@0", "start": 0, "end": len(ids)}],
    }
    yield f"data: {json.dumps({'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of the policy's tokenizer")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.model)
    app = create_app(tokenizer, 2048)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
