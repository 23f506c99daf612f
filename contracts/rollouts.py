"""What the `Rollout` workflow and its activities say to each other. Everything here is small and free of secrets.

Activities find the sandbox and the session by identity (rollout, attempt), so a worker that starts again needs no more than
these messages to go on.
"""

from typing import Annotated

from pydantic import Field

from contracts.base import FrozenContract
from contracts.config import HarnessConfig, SandboxConfig
from contracts.failures import Cause, Limit, Outcome
from contracts.identity import RolloutId
from contracts.sessions import Sampling, SessionLimits


class TaskRef(FrozenContract):
    """Which task: its directory, its name, and the digest of its files when the batch was planned."""

    name: str
    path: str
    digest: str


class RolloutSpec(FrozenContract):
    """Input of the `Rollout` workflow."""

    rollout: RolloutId
    task: TaskRef
    harness: HarnessConfig
    sandbox: SandboxConfig
    engine: str = "policy"
    policy: str = Field(description="whose weights must answer: the run's name, or the engine's own for a teacher")
    sampling: Sampling
    limits: SessionLimits
    max_context: int = 32768
    max_attempts: int = Field(3, ge=1)


class Attempt(FrozenContract):
    """Input of the activities of one attempt."""

    spec: RolloutSpec
    number: int = Field(ge=1)

    @property
    def sandbox_id(self) -> str:
        return self.spec.rollout.sandbox_id(self.number)


class Provisioned(FrozenContract):
    """A session is open, the sandbox is up and the harness is installed in it."""

    session_id: str
    sandbox_id: str
    harness_version: str
    seconds: float


class HarnessEnd(FrozenContract):
    """How the harness ended. `limit` is set when it was cut short; a crash is raised as a `RolloutError` instead."""

    exit_code: int | None
    limit: Limit | None = None
    seconds: float
    cpu_seconds: float = 0.0
    peak_memory_mb: float = 0.0
    log_tail: str = ""


class Score(FrozenContract):
    """What the verifier said: the value trained on, and its named parts where `reward.json` has several."""

    reward: float
    parts: dict[str, float] = Field(default_factory=dict)
    seconds: float
    log_tail: str = ""


class Ending(FrozenContract):
    """How a rollout ended, as the trajectory records it."""

    outcome: Outcome
    cause: Cause | None = None
    limit: Limit | None = None
    message: str = ""


class RecordTrajectory(FrozenContract):
    """Input of `record_trajectory`: everything that the Parquet file says beside the recorded calls."""

    attempt: Attempt
    session_id: str = Field("", description="empty: no session was opened")
    ending: Ending
    harness_version: str = ""
    harness: HarnessEnd | None = None
    score: Score | None = None
    phases: dict[str, float] = Field(default_factory=dict, description="seconds by phase")


class TrajectoryRef(FrozenContract):
    """A written Parquet file."""

    path: str = Field(description="relative to the storage root")
    rows: int = Field(ge=0)
    digest: str = Field(description="sha256 of the file, hex")
    calls: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    min_version: int | None = None
    max_version: int | None = None


class RolloutResult(FrozenContract):
    """Result of the `Rollout` workflow: a line of the batch's ledger."""

    rollout: RolloutId
    task: str
    ending: Ending
    attempts: int
    reward: float | None = None
    trajectory: TrajectoryRef | None = None
    phases: dict[str, float] = Field(default_factory=dict, description="seconds by phase, over all attempts")


class TaskPlan(FrozenContract):
    """Input of `plan_tasks`: take `groups` tasks of `tasks`, from position `cursor` of the endless seeded sequence.

    The sequence is one permutation of the directory's tasks after another, each drawn from (seed, epoch): every task
    once an epoch. `cursor` counts tasks since the run began, so planning is a pure function and a repeat gives the same.
    """

    tasks: str
    seed: int
    cursor: int = Field(ge=0)
    groups: Annotated[int, Field(ge=1)] | None = Field(description="none: every task once, in order of name")


class PlannedTasks(FrozenContract):
    """Result of `plan_tasks`."""

    tasks: list[TaskRef]
    epoch: int = 0
    available: int = Field(description="tasks in the directory")
