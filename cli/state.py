"""The local stack's directory: ports and secrets that stay, processes that are running, and how other commands reach them.

HOME/stack.json is mode 0600. A process is known by pid and start time, so that a later one of the same number is never taken for it.
"""

import json
import os
import secrets
import signal
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infra.settings import Settings

PREFERRED = {"temporal": 7233, "temporal_ui": 8233, "proxy": 8300, "vllm": 8000, "trainer": 8400, "s3": 8333}


@dataclass
class Component:
    """A child of the supervisor as others see it."""

    name: str
    state: str = "waiting"  # waiting, starting, ready, restarting, failed, stopped
    url: str = ""
    log: str = ""
    pid: int = 0
    started: str = ""
    restarts: int = 0
    note: str = ""


@dataclass
class StackState:
    """What HOME/stack.json holds."""

    state: str = "stopped"  # stopped, starting, ready, failed
    pid: int = 0
    started: str = ""
    recipe: str = ""
    model: str = ""
    s3: bool = False
    ports: dict[str, int] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    components: list[Component] = field(default_factory=list)
    error: str = ""

    @property
    def running(self) -> bool:
        """Whether the supervisor that wrote this lives."""
        return bool(self.pid) and start_time(self.pid) == self.started

    def secret(self, name: str) -> str:
        """A random secret, made once."""
        return self.secrets.setdefault(name, secrets.token_urlsafe(32))

    def port(self, name: str) -> int:
        """The component's port: as last time if it is free, else the usual one, else any free one."""
        for port in (self.ports.get(name), PREFERRED.get(name)):
            if port and is_free(port) and port not in {taken for other, taken in self.ports.items() if other != name}:
                self.ports[name] = port
                return port
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.ports[name] = int(probe.getsockname()[1])
        return self.ports[name]


def state_file(home: Path) -> Path:
    return home / "stack.json"


def read_state(home: Path) -> StackState:
    """The state on file; a fresh one if there is none."""
    try:
        values: dict[str, Any] = json.loads(state_file(home).read_text())
    except (FileNotFoundError, ValueError):
        return StackState()
    components = [Component(**component) for component in values.pop("components", [])]
    return StackState(**values, components=components)


def write_state(home: Path, state: StackState) -> None:
    """Atomically, readable by the owner alone."""
    file = state_file(home)
    temporary = file.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        json.dump(asdict(state), opened, indent=1)
    temporary.replace(file)


def stack_settings(home: Path) -> Settings:
    """Settings for reaching the stack in `home`, or whatever the environment says where no local stack was started."""
    state = read_state(home)
    for name, value in state.environment.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("OPENFORGE_HOME", str(home.absolute()))
    return Settings()


def is_free(port: int) -> bool:
    """Whether nothing listens on the port of the loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def start_time(pid: int) -> str:
    """Clock ticks since boot at which the process started; empty if it does not live."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


def stop_group(pid: int, started: str, patience: float = 15.0) -> None:
    """End a session leader and its process group, if it is still the process that was recorded."""
    if start_time(pid) != started:
        return
    for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            if not group_lives(pid):
                return
            time.sleep(0.05)


def group_lives(group: int) -> bool:
    """Whether a process of the group is alive and not a zombie."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False
