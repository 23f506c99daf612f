"""A real vLLM server on a tiny model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.processes import INFERENCE_PYTHON, ROOT, Server, free_port, running

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PYTHONPATH": str(ROOT / "infra/engine"),
}


class Vllm:
    """A running vLLM server."""

    def __init__(self, server: Server, model: Path) -> None:
        self.server = server
        self.url = server.url
        self.model = model

    def set_label(self, label: str) -> None:
        """Name the weights that the server holds, as a publisher does."""
        httpx.post(f"{self.url}/update_weight_version", json={"new_version": label}).raise_for_status()

    def generate(self, token_ids: list[int], **params: object) -> dict[str, object]:
        """One whole answer, asked for directly: the choice with its token ids and log-probabilities."""
        body = {"model": "policy", "token_ids": token_ids, "sampling_params": {"logprobs": 0, **params}}
        reply = httpx.post(f"{self.url}/inference/v1/generate", json=body, timeout=60)
        reply.raise_for_status()
        choice: dict[str, object] = reply.json()["choices"][0]
        return choice


@contextmanager
def vllm_server(model: Path, log: Path, *, max_model_len: int = 4096) -> Iterator[Vllm]:
    """Serve `model` until the block ends. Starting takes most of a minute."""
    port = free_port()
    command = [
        INFERENCE_PYTHON, "-m", "vllm.entrypoints.openai.api_server",
        "--model", model, "--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--max-model-len", str(max_model_len), "--max-num-seqs", "64", "--enforce-eager",
        "--num-gpu-blocks-override", "512", "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
        "--worker-extension-cls", "vllm_cpu_reload.CpuReload", "--distributed-executor-backend", "uni",
    ]  # fmt: skip
    with running(command, f"http://127.0.0.1:{port}", log, ready="/health", seconds=300, environment=ENVIRONMENT) as server:
        yield Vllm(server, model)
