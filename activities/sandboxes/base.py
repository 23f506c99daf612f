"""What a sandbox backend must do. Harness and verifier run in a sandbox; what runs there is hostile.

Invariants:
1. `create`, `start`, `kill` and `destroy` are idempotent by the sandbox's id (and the process's name), so a worker that died in the
   middle repeats the call.
2. A started process is detached: it outlives the worker that started it, and any worker finds it again by (id, name).
3. When a process has ended, been killed or reached its timeout, everything it started has ended too.
4. Inside, the proxy is `PROXY_URL` and nothing else answers, and only in processes that ask for it. The environment holds what the
   caller gave and nothing of the worker's.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, Literal

PROXY_URL: Final = "http://127.0.0.1:8300"
HOME: Final = "/home/agent"
_SYSTEM: Final = frozenset({"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "proc", "dev", "sys"})


def lies_in_system(path: PurePosixPath) -> bool:
    """Whether an absolute sandbox path lies in what a local sandbox shares with the host, read-only."""
    return len(path.parts) > 1 and path.parts[1] in _SYSTEM


@dataclass(frozen=True)
class SandboxSpec:
    """What to create. `deadline` (Unix seconds) is when a janitor may destroy it, whatever it is doing."""

    id: str
    owner: Mapping[str, str]
    image: str
    cpus: float
    memory_mb: int
    pids: int
    file_size_mb: int
    deadline: float
    workdir: str
    env: Mapping[str, str] = field(default_factory=dict)
    read_only: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class ExecResult:
    """A finished command. `exit_code` is none when it was killed for time or memory."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    out_of_memory: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class ProcessStatus:
    """A detached process. `absent`: never started here, or lost with its host."""

    state: Literal["running", "exited", "absent"]
    exit_code: int | None = None
    timed_out: bool = False
    out_of_memory: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_mb: float = 0.0


@dataclass(frozen=True)
class ProcessLogs:
    """The ends of a process's output."""

    stdout: bytes
    stderr: bytes


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox that exists. Times are Unix seconds."""

    id: str
    owner: Mapping[str, str]
    created: float
    deadline: float


class SandboxBackend(ABC):
    """Creates and drives sandboxes. Raises RolloutError with a sandbox cause; FileNotFoundError only from `get`."""

    @abstractmethod
    async def create(self, spec: SandboxSpec) -> None:
        """Make the sandbox, or find the one of this id."""

    @abstractmethod
    async def exec(
        self, sandbox: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None, timeout: float
    ) -> ExecResult:
        """Run a command to its end, without the proxy. Both outputs are cut to their last 256 KiB."""

    @abstractmethod
    async def put(self, sandbox: str, files: Mapping[str, bytes | Path]) -> None:
        """Write files at absolute sandbox paths. A Path is a host file or directory, copied with its modes; bytes get mode 0644."""

    @abstractmethod
    async def get(self, sandbox: str, path: str) -> bytes:
        """Read one regular file, never through a link that leaves the sandbox. Raises FileNotFoundError."""

    @abstractmethod
    async def remove(self, sandbox: str, paths: Sequence[str]) -> None:
        """Remove files and directories, whatever they are; what is not there is removed already."""

    @abstractmethod
    async def start(
        self,
        sandbox: str,
        process: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float,
    ) -> None:
        """Start a detached process with access to the proxy, unless one of this name was started before."""

    @abstractmethod
    async def status(self, sandbox: str, process: str) -> ProcessStatus:
        """Where a detached process stands."""

    @abstractmethod
    async def wait(self, sandbox: str, process: str, timeout: float) -> ProcessStatus:
        """Wait up to `timeout` seconds for it to end; returns the status then, which may still be running."""

    @abstractmethod
    async def logs(self, sandbox: str, process: str, tail_bytes: int) -> ProcessLogs:
        """The last bytes of its output."""

    @abstractmethod
    async def kill(self, sandbox: str, process: str) -> None:
        """End it and everything it started; returns when they have ended."""

    @abstractmethod
    async def destroy(self, sandbox: str) -> None:
        """End every process of the sandbox and remove its files."""

    @abstractmethod
    async def list_sandboxes(self) -> list[SandboxInfo]:
        """Every sandbox of this backend. Raises rather than return a part."""

    async def close(self) -> None:  # noqa: B027  (a backend without connections has nothing to close)
        """Release connections; sandboxes stay."""
