"""What the proxy adds to a call: the same prompt and sampling through it (rendered, recorded, made durable) and directly at vLLM."""

import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import httpx

from contracts.sessions import Sampling, SessionLimits
from tests.support.processes import ROOT, TRAINER_PYTHON
from tests.support.proxy import proxy_server
from tests.support.vllm import vllm_server

CALLS, TOKENS = 200, 16


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = directory / "model"
        subprocess.run([TRAINER_PYTHON, ROOT / "tests/support/tiny_model.py", model], check=True, capture_output=True)
        with vllm_server(model, directory / "vllm.log") as vllm, proxy_server(model, {"policy": vllm.url}, directory) as proxy:
            vllm.set_label("run@0")
            sampling = Sampling(temperature=1.0, max_tokens=TOKENS)
            session, key = proxy.open(sampling=sampling, limits=SessionLimits(calls=10_000), deadline=time.time() + 3600)
            through = httpx.Client(base_url=proxy.url, headers={"authorization": f"Bearer {key}"}, timeout=60)
            direct = httpx.Client(base_url=vllm.url, timeout=60)

            def ask(number: int) -> None:
                body = {"model": "policy", "messages": [{"role": "user", "content": f"question {number:05d}"}]}
                through.post("/v1/chat/completions", json=body).raise_for_status()

            ask(0)
            prompt = proxy.calls(session).calls[0].prompt_ids
            params = {"max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0}

            def generate(number: int) -> None:
                body = {"model": "policy", "token_ids": [*prompt[:-1], number % 400 + 9], "sampling_params": params}
                direct.post("/inference/v1/generate", json=body).raise_for_status()

            times: dict[str, list[float]] = {"through the proxy": [], "direct": []}
            for number in range(1, CALLS + 20):
                for label, call in (("through the proxy", ask), ("direct", generate)):
                    started = time.perf_counter()
                    call(number)
                    if number >= 20:
                        times[label].append(time.perf_counter() - started)
    medians = {label: statistics.median(values) for label, values in times.items()}
    for label, median in medians.items():
        print(f"{label:20} median {1000 * median:.2f} ms a call of at most {TOKENS} tokens, {CALLS} calls one after another")
    added = medians["through the proxy"] - medians["direct"]
    print(f"ratio {medians['through the proxy'] / medians['direct']:.2f}; added {1000 * added:.2f} ms")
