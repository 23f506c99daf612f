"""Every activity as the workflows call it: its time limits and its retries, each with its reason.

An activity decides itself what is hopeless (a non-retryable error, whose type is the cause) and a workflow decides about another
attempt. What is retried here is therefore only what says nothing about the rollout: a worker that died or was stopped (noticed by the
missing heartbeat), a service that is away.
"""

from datetime import timedelta
from typing import Any, Final, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.workflow import ActivityCancellationType

with workflow.unsafe.imports_passed_through():
    from contracts.batches import BatchSummary, SealBatch
    from contracts.config import RunConfig
    from contracts.rollouts import (
        Attempt,
        HarnessEnd,
        PlannedTasks,
        Provisioned,
        RecordTrajectory,
        Score,
        TaskPlan,
        TrajectoryRef,
    )
    from contracts.runs import QUEUE, SANDBOX_QUEUE, TRAINER_QUEUE, Activity
    from contracts.updates import Published, PublishRequest, UpdateRequest, UpdateResult

# Activities beat every two seconds. A worker that is silent for fifteen is dead or cut off; less would blame a busy machine.
HEARTBEAT: Final = timedelta(seconds=15)
# Another worker takes over at once; if none can, there is no use in asking every second.
TAKE_OVER: Final = RetryPolicy(initial_interval=timedelta(seconds=1), backoff_coefficient=2, maximum_interval=timedelta(seconds=30))
# What makes or uses a sandbox: on cancel it is asked to end, and awaited, or it would go on beside the clean-up.
WAIT: Final = ActivityCancellationType.WAIT_CANCELLATION_COMPLETED
# Storage, trainer or engine are away: people mend such things in minutes or hours, and nothing is lost by waiting.
OUTLAST: Final = RetryPolicy(initial_interval=timedelta(seconds=1), backoff_coefficient=2, maximum_interval=timedelta(minutes=1))


Result = TypeVar("Result")


async def _execute(name: Activity, request: object, *, result_type: type[Result], **options: Any) -> Result:
    result: Result = await workflow.execute_activity(name, request, result_type=result_type, **options)
    return result


async def preflight(config: RunConfig) -> str:
    # A service that is not up yet is a problem to report, not to wait for: the person who started the run is looking.
    return await _execute(
        Activity.PREFLIGHT,
        config,
        result_type=str,
        task_queue=QUEUE,
        start_to_close_timeout=timedelta(minutes=2),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=TAKE_OVER,
        summary="check config, tasks and services",
    )


async def plan_tasks(plan: TaskPlan) -> PlannedTasks:
    # Reads a directory: minutes only for thousands of tasks on slow disks.
    return await _execute(
        Activity.PLAN_TASKS,
        plan,
        result_type=PlannedTasks,
        task_queue=QUEUE,
        start_to_close_timeout=timedelta(minutes=10),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=TAKE_OVER,
        summary=f"tasks from position {plan.cursor}" if plan.groups else "every task",
    )


async def provision(attempt: Attempt) -> Provisioned:
    # Ten minutes cover pulling an image in a cluster. Its own failures are causes, and end the attempt.
    return await _execute(
        Activity.PROVISION,
        attempt,
        result_type=Provisioned,
        task_queue=SANDBOX_QUEUE,
        start_to_close_timeout=timedelta(minutes=10),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=TAKE_OVER,
        cancellation_type=WAIT,
        summary=attempt.sandbox_id,
    )


async def run_harness(attempt: Attempt) -> HarnessEnd:
    # The harness has its own deadline inside the sandbox; this one only bounds a watch that hangs. A repeat re-attaches.
    return await _execute(
        Activity.RUN_HARNESS,
        attempt,
        result_type=HarnessEnd,
        task_queue=SANDBOX_QUEUE,
        start_to_close_timeout=timedelta(seconds=attempt.spec.limits.seconds + 600),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=TAKE_OVER,
        cancellation_type=WAIT,
        summary=f"{attempt.spec.harness.name} on {attempt.spec.task.name}",
    )


async def score(attempt: Attempt) -> Score:
    # The verifier has the task's own time limit. It may run again after a worker died: it starts from a cleared /logs/verifier.
    return await _execute(
        Activity.SCORE,
        attempt,
        result_type=Score,
        task_queue=SANDBOX_QUEUE,
        start_to_close_timeout=timedelta(hours=4),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=TAKE_OVER,
        cancellation_type=WAIT,
        summary=attempt.spec.task.name,
    )


async def record_trajectory(request: RecordTrajectory) -> TrajectoryRef:
    # A finished rollout is worth any wait. Its place in the window stays taken, so an outage stops new rollouts and burns no task.
    return await _execute(
        Activity.RECORD_TRAJECTORY,
        request,
        result_type=TrajectoryRef,
        task_queue=SANDBOX_QUEUE,
        start_to_close_timeout=timedelta(minutes=5),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=OUTLAST,
        summary=request.ending.outcome.value,
    )


async def clean_up(attempt: Attempt) -> None:
    # Until it has succeeded: a sandbox or a credential that stays is worse than a late rollout.
    await workflow.execute_activity(
        Activity.CLEAN_UP,
        attempt,
        task_queue=SANDBOX_QUEUE,
        start_to_close_timeout=timedelta(minutes=5),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=TAKE_OVER,
        summary=attempt.sandbox_id,
    )


async def seal_batch(request: SealBatch) -> BatchSummary:
    return await _execute(
        Activity.SEAL_BATCH,
        request,
        result_type=BatchSummary,
        task_queue=QUEUE,
        start_to_close_timeout=timedelta(minutes=30),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=OUTLAST,
        summary=f"{request.batch}: {request.started} rollouts",
    )


async def update_policy(request: UpdateRequest) -> UpdateResult:
    # Hours for a large model. Idempotent at the trainer by (run, iteration): a repeat finds the work, or its result.
    return await _execute(
        Activity.UPDATE_POLICY,
        request,
        result_type=UpdateResult,
        task_queue=TRAINER_QUEUE,
        start_to_close_timeout=timedelta(hours=24),
        heartbeat_timeout=timedelta(seconds=60),
        retry_policy=OUTLAST,
        summary=f"version {request.iteration} to {request.version}",
    )


async def publish_policy(request: PublishRequest) -> Published:
    # Waits for requests in flight to end, then loads: minutes. An engine that is away is asked again until it is back.
    return await _execute(
        Activity.PUBLISH_POLICY,
        request,
        result_type=Published,
        task_queue=QUEUE,
        start_to_close_timeout=timedelta(minutes=30),
        heartbeat_timeout=HEARTBEAT,
        retry_policy=OUTLAST,
        summary=f"version {request.version} to pool {request.engine}",
    )
