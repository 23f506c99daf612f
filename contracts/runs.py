"""Input, state, messages and progress of the `TrainingRun` and `Evaluation` workflows; names of workflows and activities."""

from enum import StrEnum
from typing import Final

from pydantic import Field

from contracts.base import Contract, FrozenContract
from contracts.batches import BatchSummary
from contracts.config import RunConfig
from contracts.updates import UpdateResult

QUEUE: Final = "openforge"
SANDBOX_QUEUE: Final = "openforge-sandboxes"
TRAINER_QUEUE: Final = "openforge-trainer"


class Workflow(StrEnum):
    """Workflow types, as `temporal workflow start --type` takes them."""

    TRAINING_RUN = "TrainingRun"
    ROLLOUT = "Rollout"
    EVALUATION = "Evaluation"


class Activity(StrEnum):
    """Activity types: a workflow names an activity by this, never by importing it."""

    PREFLIGHT = "preflight"
    PLAN_TASKS = "plan_tasks"
    PROVISION = "provision"
    RUN_HARNESS = "run_harness"
    SCORE = "score"
    RECORD_TRAJECTORY = "record_trajectory"
    CLEAN_UP = "clean_up"
    SEAL_BATCH = "seal_batch"
    UPDATE_POLICY = "update_policy"
    PUBLISH_POLICY = "publish_policy"


class SearchAttribute(StrEnum):
    """Search attributes, by which the UI lists and filters runs and rollouts."""

    RUN = "OpenForgeRun"  # keyword
    BATCH = "OpenForgeBatch"  # keyword
    TASK = "OpenForgeTask"  # keyword
    OUTCOME = "OpenForgeOutcome"  # keyword: of a rollout
    REWARD = "OpenForgeReward"  # double: of a rollout, or the mean of a run's last iteration
    ITERATION = "OpenForgeIteration"  # int: of a run
    PHASE = "OpenForgePhase"  # keyword: of a run


class IterationSummary(FrozenContract):
    """One line of the run's table: the batch, and the update that it fed."""

    iteration: int
    kind: str = Field(description="warm start or rl")
    batch: BatchSummary
    update: UpdateResult
    seconds: dict[str, float] = Field(default_factory=dict, description="by phase: rollouts, update, publish")


class EvaluationSummary(FrozenContract):
    """One cell of an evaluation."""

    split: str
    mode: str
    batch: BatchSummary


class RunState(Contract):
    """All that survives continue-as-new."""

    iteration: int = Field(0, description="next iteration; equals the policy version it samples with")
    last_iteration: int | None = Field(None, description="iterations in all, the warm start included; extend raises it")
    cursor: int = Field(0, description="training tasks planned so far")
    concurrency: int | None = None
    paused: bool = False
    pause_reason: str = ""
    stopping: bool = False
    iterations: list[IterationSummary] = Field(default_factory=list)
    evaluations: list[EvaluationSummary] = Field(default_factory=list)
    started_at: float = 0.0
    harness_version: str = ""


class TrainingRunInput(Contract):
    """Input of `TrainingRun`. A person gives `config` alone; `state` is how the run hands itself on."""

    config: RunConfig
    state: RunState | None = None


class EvaluationInput(Contract):
    """Input of `Evaluation`: measure one published version on every split and mode of the config."""

    config: RunConfig
    version: int = Field(ge=0)
    concurrency: int | None = None


class EvaluationResult(Contract):
    """Result of `Evaluation`."""

    version: int
    cells: list[EvaluationSummary]


class StopRequest(FrozenContract):
    """Signal `stop`. Graceful: the iteration in hand is finished and the final evaluation made. Now: rollouts are cancelled."""

    now: bool = False


class PauseRequest(FrozenContract):
    """Signal `pause`: no new rollout starts; those in flight go on."""

    reason: str = "asked for"


class ExtendRequest(FrozenContract):
    """Update `extend`: so many more iterations."""

    iterations: int = Field(ge=1)


class ConcurrencyRequest(FrozenContract):
    """Update `set_concurrency`."""

    rollouts: int = Field(ge=1)


class InFlight(Contract):
    """The batch in hand."""

    batch: str = ""
    started: int = 0
    of: int = 0
    running: int = 0
    completed: int = 0
    truncated: int = 0
    failed: int = 0
    reward_sum: float = 0.0
    rewarded: int = 0


class Progress(Contract):
    """Answer of the query `progress`."""

    run: str
    phase: str = Field(description="what is being done, for a person: 'rollouts', 'update', 'paused: …'")
    iteration: int
    iterations: int
    version: int
    in_flight: InFlight
    iterations_done: list[IterationSummary]
    evaluations: list[EvaluationSummary]
    measuring: str = Field("", description="id of the evaluation in hand, which answers `progress` too")
    started_at: float
    paused: bool
    stopping: bool


class RunResult(Contract):
    """Result of `TrainingRun`."""

    run: str
    version: int
    iterations: list[IterationSummary]
    evaluations: list[EvaluationSummary]
