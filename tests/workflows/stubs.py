"""Stubs of the activities: the workflows are real, what they call is scripted. For workflow tests alone."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.trajectories.seal import summarise
from contracts.batches import BatchSummary, Ledger, Manifest, SealBatch
from contracts.config import RunConfig
from contracts.failures import Cause
from contracts.identity import manifest_path
from contracts.rollouts import (
    Attempt,
    HarnessEnd,
    PlannedTasks,
    Provisioned,
    RecordTrajectory,
    Score,
    TaskPlan,
    TaskRef,
    TrajectoryRef,
)
from contracts.runs import Activity
from contracts.updates import Published, PublishRequest, UpdateRequest, UpdateResult

CONFIG: dict[str, Any] = {
    "name": "run",
    "policy": {"model": "/model"},
    "tasks": "/tasks",
    "rollout": {"groups": 2, "group_size": 2, "concurrency": 2, "max_attempts": 2, "pause_after_failures": 3},
    "training": {"iterations": 2},
    "evaluation": {"splits": {"held_out": "/held"}, "modes": {"sampled": 1.0}},
}


@dataclass
class StubActivities:
    """What happened, and what is to happen: `fail` names the cause of an attempt, `gate` holds harnesses back, `hold` an activity.

    What is in `broken` fails for good, and can be mended.
    """

    fail: Callable[[Attempt], Cause | None] = lambda _: None
    harness: HarnessEnd = field(default_factory=lambda: HarnessEnd(exit_code=0, seconds=0.1))
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    hold: dict[Activity, asyncio.Event] = field(default_factory=dict)
    broken: set[Activity] = field(default_factory=set)
    reached: Counter[Activity] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    running: int = 0
    most_running: int = 0
    open_sandboxes: set[str] = field(default_factory=set)
    trained: list[UpdateRequest] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    sealed: list[SealBatch] = field(default_factory=list)
    plans: list[TaskPlan] = field(default_factory=list)
    recorded: list[RecordTrajectory] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    async def _reach(self, name: Activity) -> None:
        self.reached[name] += 1
        if name in self.hold:
            await self.hold[name].wait()
        if name in self.broken:
            raise ApplicationError(f"{name} is broken", non_retryable=True)

    @property
    def all(self) -> list[Callable[..., Any]]:
        return [
            self.preflight, self.plan_tasks, self.provision, self.run_harness, self.score, self.record_trajectory, self.clean_up,
            self.seal_batch, self.update_policy, self.publish_policy,
        ]  # fmt: skip

    @activity.defn(name=Activity.PREFLIGHT)
    async def preflight(self, config: RunConfig) -> str:
        if config.tasks == "/missing":
            raise ApplicationError("tasks: /missing: no such directory of tasks", type="preflight", non_retryable=True)
        return "1.0"

    @activity.defn(name=Activity.PLAN_TASKS)
    async def plan_tasks(self, plan: TaskPlan) -> PlannedTasks:
        await self._reach(Activity.PLAN_TASKS)
        self.plans.append(plan)
        places = range(plan.cursor, plan.cursor + (plan.groups or 2))
        tasks = [TaskRef(name=f"{plan.tasks}/{place}", path=f"{plan.tasks}/{place}", digest="") for place in places]
        return PlannedTasks(tasks=tasks, available=100)

    @activity.defn(name=Activity.PROVISION)
    async def provision(self, attempt: Attempt) -> Provisioned:
        await self._reach(Activity.PROVISION)
        self.open_sandboxes.add(attempt.sandbox_id)
        return Provisioned(session_id=f"s-{attempt.sandbox_id}", sandbox_id=attempt.sandbox_id, harness_version="1.0", seconds=0.1)

    @activity.defn(name=Activity.RUN_HARNESS)
    async def run_harness(self, attempt: Attempt) -> HarnessEnd:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            while not self.gate.is_set():
                activity.heartbeat()
                await asyncio.sleep(0.05)
        finally:
            self.running -= 1
        if cause := self.fail(attempt):
            raise ApplicationError(f"made to fail by {cause}", type=cause, non_retryable=True)
        return self.harness

    @activity.defn(name=Activity.SCORE)
    async def score(self, attempt: Attempt) -> Score:
        return Score(reward=float(attempt.spec.rollout.member), seconds=0.1)

    @activity.defn(name=Activity.RECORD_TRAJECTORY)
    async def record_trajectory(self, request: RecordTrajectory) -> TrajectoryRef:
        await self._reach(Activity.RECORD_TRAJECTORY)
        self.recorded.append(request)
        return TrajectoryRef(path=request.attempt.spec.rollout.trajectory_path, rows=1, digest="0")

    @activity.defn(name=Activity.CLEAN_UP)
    async def clean_up(self, attempt: Attempt) -> None:
        await self._reach(Activity.CLEAN_UP)
        self.counts["clean_up"] += 1
        self.open_sandboxes.discard(attempt.sandbox_id)

    @activity.defn(name=Activity.SEAL_BATCH)
    async def seal_batch(self, request: SealBatch) -> BatchSummary:
        await self._reach(Activity.SEAL_BATCH)
        self.sealed.append(request)
        ledger = Ledger.of(request.results, request.started)
        manifest = Manifest(
            run=request.run, batch=request.batch, version=request.version, ledger=ledger, seconds=request.seconds, results=request.results
        )
        return summarise(manifest, manifest_path(request.run, request.batch))

    @activity.defn(name=Activity.UPDATE_POLICY)
    async def update_policy(self, request: UpdateRequest) -> UpdateResult:
        await self._reach(Activity.UPDATE_POLICY)
        self.trained.append(request)
        return UpdateResult(version=request.version, rows=4, seconds={"update": 0.1})

    @activity.defn(name=Activity.PUBLISH_POLICY)
    async def publish_policy(self, request: PublishRequest) -> Published:
        await self._reach(Activity.PUBLISH_POLICY)
        self.published.append(request.version)
        return Published(version=request.version, engines=1, loaded=1, seconds=0.1)
