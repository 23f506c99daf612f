"""Start a server as a process of its own, wait until it answers, and leave nothing of it behind."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
BASE_PYTHON = ROOT / ".envs/base/bin/python"
TRAINER_PYTHON = ROOT / ".envs/trainer/bin/python"
INFERENCE_PYTHON = ROOT / ".envs/inference/bin/python"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running server: its process, its address and its log."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process and all it started, and wait for its end."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        self.process.wait(30)

    def wait_for(self, path: str, seconds: float) -> None:
        """Wait until GET `path` answers 200."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}"
            with suppress(httpx.HTTPError):
                if httpx.get(self.url + path, timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"{self.url}{path} did not answer within {seconds} s:\n{self.log.read_text()[-4000:]}")


@contextmanager
def running(
    command: Sequence[str | Path], url: str, log: Path, *, ready: str, seconds: float, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run a server until the block ends; it is in the block once GET `ready` has answered."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, url, log)
    try:
        server.wait_for(ready, seconds)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)
        server.kill()
