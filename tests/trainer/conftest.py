"""A real trainer service over a directory of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.storage import Storage
from tests.support.processes import TRAINER_PYTHON, Server, free_port, running

TOKEN = "trainer-token"


class Trainer:
    """A running trainer and its storage."""

    def __init__(self, server: Server, storage: Storage, model: Path) -> None:
        self.server = server
        self.storage = storage
        self.model = model
        self.http = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60)

    def put(self, run: str, iteration: int, manifest: str, method: dict[str, Any], **changes: Any) -> dict[str, Any]:
        body = {"run": run, "iteration": iteration, "manifest": manifest, "base_model": str(self.model), "max_context": 256}
        reply = self.http.put(f"/updates/{run}/{iteration}", json=body | {"method": method} | changes)
        assert reply.status_code == 200, reply.text
        status: dict[str, Any] = reply.json()
        return status

    def get(self, run: str, iteration: int) -> dict[str, Any]:
        status: dict[str, Any] = self.http.get(f"/updates/{run}/{iteration}").json()
        return status

    def update(self, *arguments: Any, **changes: Any) -> dict[str, Any]:
        """Start an update and wait for its end."""
        status = self.put(*arguments, **changes)
        while status["state"] == "running":
            status = self.get(arguments[0], arguments[1])
        return status


@contextmanager
def trainer_server(directory: Path, model: Path) -> Iterator[Trainer]:
    port = free_port()
    command = [TRAINER_PYTHON, "-m", "trainer", "--port", str(port), "--work-dir", directory / "work"]
    environment = {"OPENFORGE_STORAGE_URL": f"file://{directory}/storage", "OPENFORGE_TRAINER_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    url = f"http://127.0.0.1:{port}"
    with running(command, url, directory / "trainer.log", ready="/healthz", seconds=180, environment=environment) as server:
        yield Trainer(server, Storage(f"file://{directory}/storage"), model)


@pytest.fixture(scope="session")
def trainer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with trainer_server(tmp_path_factory.mktemp("trainer"), tiny_model) as served:
        yield served
