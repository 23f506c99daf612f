"""A rollout that is cancelled, wherever it is: one ending, nothing left behind. Real Temporal server, stub activities."""

import asyncio
import uuid

import pytest
from temporalio.client import Client, WorkflowHandle

from contracts.config import HarnessConfig, SandboxConfig
from contracts.failures import Cause, Outcome
from contracts.identity import RolloutId
from contracts.rollouts import RolloutResult, RolloutSpec, TaskRef
from contracts.runs import QUEUE, Activity, Workflow
from contracts.sessions import Sampling, SessionLimits
from tests.workflows.stubs import StubActivities
from tests.workflows.test_training_run import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def start(client: Client) -> WorkflowHandle[object, RolloutResult]:
    rollout = RolloutId(run=f"run-{uuid.uuid4().hex[:8]}", batch="iteration=000000", group=0, member=0)
    spec = RolloutSpec(
        rollout=rollout, task=TaskRef(name="t", path="/t", digest=""), harness=HarnessConfig(), sandbox=SandboxConfig(), policy="run",
        sampling=Sampling(), limits=SessionLimits(), max_attempts=3,
    )  # fmt: skip
    return await client.start_workflow(Workflow.ROLLOUT, spec, id=rollout.workflow_id, task_queue=QUEUE, result_type=RolloutResult)


def has_reacted(history: str) -> bool:
    """Whether the workflow has carried out a task since it was asked to cancel."""
    _, requested, after = history.partition("WORKFLOW_EXECUTION_CANCEL_REQUESTED")
    return bool(requested) and "WORKFLOW_TASK_COMPLETED" in after


async def cancelled_in(stubs: StubActivities, client: Client, activity: Activity) -> RolloutResult:
    """Cancel a rollout while `activity` is at work; the activity itself finishes its work."""
    stubs.hold[activity] = asyncio.Event()
    handle = await start(client)
    await until(lambda: stubs.reached[activity] == 1)
    await handle.cancel()
    async with asyncio.timeout(30):
        while not has_reacted(history := (await handle.fetch_history()).to_json()):
            await asyncio.sleep(0.05)
    if activity is Activity.PROVISION:
        assert '"clean_up"' not in history, "cleaned up beside what was still being made"
    stubs.hold[activity].set()
    return await handle.result()


async def test_a_sandbox_that_was_still_being_created_is_removed(stubs: StubActivities, client: Client) -> None:
    result = await cancelled_in(stubs, client, Activity.PROVISION)
    assert result.ending.outcome is Outcome.CANCELLED
    assert stubs.counts["clean_up"] == 1
    assert stubs.open_sandboxes == set()
    assert [request.ending.outcome for request in stubs.recorded] == [Outcome.CANCELLED]


async def test_what_was_being_recorded_is_recorded_and_cleaned_up(stubs: StubActivities, client: Client) -> None:
    result = await cancelled_in(stubs, client, Activity.RECORD_TRAJECTORY)
    assert result.ending.outcome is Outcome.COMPLETED
    assert result.trajectory is not None
    assert stubs.open_sandboxes == set()


async def test_a_clean_up_is_finished(stubs: StubActivities, client: Client) -> None:
    result = await cancelled_in(stubs, client, Activity.CLEAN_UP)
    assert result.ending.outcome is Outcome.COMPLETED
    assert stubs.counts["clean_up"] == 1
    assert stubs.open_sandboxes == set()


async def test_between_two_attempts_no_other_begins(stubs: StubActivities, client: Client) -> None:
    stubs.fail = lambda _: Cause.SANDBOX_LOST
    result = await cancelled_in(stubs, client, Activity.CLEAN_UP)
    assert result.ending.outcome is Outcome.CANCELLED
    assert stubs.reached[Activity.PROVISION] == 1
    assert stubs.open_sandboxes == set()
    assert [request.ending.outcome for request in stubs.recorded] == [Outcome.CANCELLED]
