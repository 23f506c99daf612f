"""A real proxy process, and what a test needs to talk to it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from contracts.identity import RolloutId
from contracts.sessions import OpenSession, Sampling, SessionCalls, SessionLimits, SessionStatus
from tests.support.processes import BASE_PYTHON, Server, free_port, running

ADMIN = "admin-token-of-the-tests"


class Proxy:
    """A running proxy."""

    def __init__(self, server: Server, socket: Path) -> None:
        self.server = server
        self.url = server.url
        self.socket = socket
        self.admin = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {ADMIN}"}, timeout=60)

    def open(self, member: int = 0, **changes: Any) -> tuple[str, str]:
        """Open the session of rollout `member`; returns (session id, key)."""
        session = OpenSession(
            rollout=RolloutId(run="run", batch="iteration=000000", group=0, member=member),
            attempt=1,
            policy="run",
            sampling=Sampling(temperature=1.0),
            limits=SessionLimits(),
            deadline=time.time() + 120,
        ).model_copy(update=changes)
        reply = self.admin.post("/sessions", json=session.model_dump(mode="json"))
        assert reply.status_code == 200, reply.text
        return reply.json()["session_id"], reply.json()["api_key"]

    def status(self, session_id: str) -> SessionStatus:
        return SessionStatus.model_validate(self.admin.get(f"/sessions/{session_id}").json())

    def calls(self, session_id: str) -> SessionCalls:
        return SessionCalls.model_validate(self.admin.get(f"/sessions/{session_id}/calls").json())

    def close(self, session_id: str) -> SessionStatus:
        return SessionStatus.model_validate(self.admin.post(f"/sessions/{session_id}/close").json())

    def metric(self, line: str) -> float:
        """The value of one line of /metrics; 0 if it is not there."""
        for text in self.admin.get("/metrics").text.splitlines():
            if text.rpartition(" ")[0] == line:
                return float(text.rpartition(" ")[2])
        return 0.0


@contextmanager
def proxy_server(
    tokenizer: Path, engines: dict[str, str], directory: Path, *, port: int | None = None, arguments: tuple[str, ...] = ()
) -> Iterator[Proxy]:
    """Run a proxy until the block ends. Its journal is in `directory`, so the next one there goes on where it stopped."""
    port = port or free_port()
    socket = directory / "proxy.sock"
    command = [
        BASE_PYTHON, "-m", "proxy", "--tokenizer", tokenizer, "--port", str(port), "--socket", socket,
        "--journal", directory / "journal.db", *arguments,
    ]  # fmt: skip
    environment = {
        "OPENFORGE_PROXY_ADMIN_TOKEN": ADMIN,
        "OPENFORGE_ENGINES": ",".join(f"{name}={url}" for name, url in engines.items()),
    }
    url = f"http://127.0.0.1:{port}"
    with running(command, url, directory / "proxy.log", ready="/healthz", seconds=60, environment=environment) as server:
        yield Proxy(server, socket)
