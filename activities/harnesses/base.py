"""What a harness adapter says: what to put in the sandbox, how to point the harness at the proxy, its command, how it ended.

The harness itself is never changed. An adapter is one file here and one line in `activities/harnesses/__init__.py`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, SecretStr

from activities.sandboxes.base import HOME, PROXY_URL, ProcessLogs, ProcessStatus
from contracts.failures import Cause, RolloutError


class HarnessOptions(BaseModel):
    """An adapter's options; unknown ones are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class HarnessContext:
    """What an adapter may use to configure its harness for one rollout."""

    instruction: str
    workdir: str
    api_key: SecretStr
    model: str = "policy"
    base_url: str = PROXY_URL
    home: str = HOME
    max_context: int = 32768
    solution: Path | None = None
    env: dict[str, str] = field(default_factory=dict)  # the task's own environment


class Harness(ABC):
    """An adapter."""

    name: ClassVar[str]
    Options: ClassVar[type[HarnessOptions]]
    uses_model: ClassVar[bool] = True

    @abstractmethod
    def version(self) -> str:
        """Version of the installed harness. Raises RolloutError(HARNESS_INSTALL) if it is not installed."""

    def read_only(self) -> dict[str, Path]:
        """Sandbox path to host path of what is mounted read-only: the installed harness."""
        return {}

    def files(self, context: HarnessContext) -> dict[str, bytes | Path]:
        """Files written into the sandbox before the harness starts, by absolute sandbox path."""
        return {}

    def env(self, context: HarnessContext) -> dict[str, str]:
        """Environment of the harness, the task's own included by the caller."""
        return {}

    @abstractmethod
    def command(self, context: HarnessContext) -> list[str]:
        """Its command line."""

    def check_end(self, status: ProcessStatus, logs: ProcessLogs) -> None:
        """Raise RolloutError(HARNESS_CRASH) if the harness broke. Called only for an end that no limit explains."""
        if status.state == "absent":
            raise RolloutError(Cause.SANDBOX_LOST, f"the {self.name} process is gone without a trace")
        if status.exit_code != 0:
            tail = (logs.stderr or logs.stdout)[-2000:].decode(errors="replace").strip()
            raise RolloutError(Cause.HARNESS_CRASH, f"{self.name} exited with {status.exit_code}: {tail}")
