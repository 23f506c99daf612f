"""The run as a workflow: order, ledger, messages, failures. Real Temporal server, real workflows, stub activities."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowUpdateFailedError

from contracts.config import RunConfig
from contracts.failures import Cause, Limit, Outcome
from contracts.rollouts import HarnessEnd
from contracts.runs import (
    QUEUE,
    Activity,
    ConcurrencyRequest,
    ExtendRequest,
    PauseRequest,
    Progress,
    StopRequest,
    TrainingRunInput,
    Workflow,
)
from tests.workflows.conftest import Start
from tests.workflows.stubs import CONFIG, StubActivities

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def progress(handle: Any) -> Progress:
    found: Progress = await handle.query("progress", result_type=Progress)
    return found


async def test_versions_follow_one_another_and_the_first_and_last_are_measured(stubs: StubActivities, start: Start) -> None:
    handle = await start()
    result = await handle.result()
    assert [request.iteration for request in stubs.trained] == [0, 1]
    assert result.version == 2
    assert [cell.batch.version for cell in result.evaluations] == [0, 2]
    batches = [seal.batch for seal in stubs.sealed]
    assert batches[0].startswith("evaluation=000000")
    assert batches[1:3] == ["iteration=000000", "iteration=000001"]
    assert stubs.open_sandboxes == set()


async def test_each_iteration_goes_on_where_the_last_one_stopped(stubs: StubActivities, start: Start) -> None:
    await (await start()).result()
    assert [plan.cursor for plan in stubs.plans if plan.groups] == [0, 2]
    assert len({plan.seed for plan in stubs.plans}) == 1


async def test_a_warm_start_is_iteration_0_by_the_teacher(stubs: StubActivities, start: Start) -> None:
    result = await (await start(warm_start={"tasks": "/demonstrations"})).result()
    assert [entry.kind for entry in result.iterations] == ["warm start", "rl", "rl"]
    assert type(stubs.trained[0].method).__name__ == "SftConfig"
    first = [request for request in stubs.recorded if request.attempt.spec.rollout.batch == "iteration=000000"]
    assert {(request.attempt.spec.engine, request.attempt.spec.policy) for request in first} == {("teacher", "teacher")}
    assert [cell.batch.version for cell in result.evaluations] == [1, 3]


async def test_no_more_rollouts_run_at_once_than_the_window_allows(stubs: StubActivities, start: Start) -> None:
    stubs.gate.clear()
    handle = await start(rollout={**CONFIG["rollout"], "group_size": 6, "concurrency": 3}, evaluation={"splits": {}})
    await until(lambda: stubs.running == 3)
    stubs.gate.set()
    await handle.result()
    assert stubs.most_running == 3


async def test_infrastructure_is_tried_again_and_only_the_last_attempt_is_on_file(stubs: StubActivities, start: Start) -> None:
    stubs.fail = lambda attempt: Cause.SANDBOX_LOST if attempt.number == 1 and attempt.spec.rollout.member == 0 else None
    result = await (await start(training={"iterations": 1}, evaluation={"splits": {}})).result()
    batch = result.iterations[0].batch
    assert (batch.started, batch.completed, batch.attempts, batch.failed) == (4, 4, 6, {})
    assert stubs.counts["clean_up"] == 6
    assert len(stubs.recorded) == 4


async def test_a_rollout_that_cannot_be_saved_fails_with_its_cause(stubs: StubActivities, start: Start) -> None:
    stubs.fail = lambda attempt: Cause.HARNESS_CRASH if attempt.spec.rollout.member == 1 else None
    result = await (await start(training={"iterations": 1}, evaluation={"splits": {}})).result()
    assert result.iterations[0].batch.failed == {"harness_crash": 2}
    failed = [entry for entry in stubs.sealed[0].results if entry.ending.outcome is Outcome.FAILED]
    assert {entry.attempts for entry in failed} == {2}
    assert all("made to fail" in entry.ending.message and entry.trajectory for entry in failed)
    assert stubs.open_sandboxes == set()


async def test_a_broken_verifier_is_not_tried_again(stubs: StubActivities, start: Start) -> None:
    stubs.fail = lambda _: Cause.VERIFIER_ERROR
    result = await (await start(training={"iterations": 1}, evaluation={"splits": {}})).result()
    assert result.iterations[0].batch.failed == {"verifier_error": 4}
    assert result.iterations[0].batch.attempts == 4


async def test_a_truncated_rollout_is_scored(stubs: StubActivities, start: Start) -> None:
    stubs.harness = HarnessEnd(exit_code=None, limit=Limit.WALL_CLOCK, seconds=1)
    result = await (await start(training={"iterations": 1}, evaluation={"splits": {}})).result()
    assert (result.iterations[0].batch.truncated, result.iterations[0].batch.reward_mean) == (4, 0.5)


async def test_an_outage_pauses_the_run_and_says_so(stubs: StubActivities, start: Start) -> None:
    stubs.fail = lambda _: Cause.ENGINE_UNAVAILABLE
    handle = await start(rollout={**CONFIG["rollout"], "group_size": 8, "concurrency": 1, "max_attempts": 1}, evaluation={"splits": {}})
    async with asyncio.timeout(30):
        while not (await progress(handle)).paused:
            await asyncio.sleep(0.05)
    found = await progress(handle)
    assert "3 rollouts in a row failed, the last one by engine_unavailable" in found.phase
    assert found.in_flight.started == 3
    stubs.fail = lambda _: None
    await handle.signal("resume")
    result = await handle.result()
    assert result.iterations[0].batch.failed == {"engine_unavailable": 3}
    assert result.iterations[0].batch.completed == 13


async def test_an_outage_during_an_evaluation_pauses_the_run_until_it_is_resumed(stubs: StubActivities, start: Start) -> None:
    stubs.fail = lambda _: Cause.ENGINE_UNAVAILABLE
    rollout = {**CONFIG["rollout"], "concurrency": 1, "max_attempts": 1, "pause_after_failures": 1}
    handle = await start(rollout=rollout, training={"iterations": 0})
    async with asyncio.timeout(30):
        while not (await progress(handle)).paused:
            await asyncio.sleep(0.05)
    assert "1 rollouts in a row failed" in (await progress(handle)).phase
    stubs.fail = lambda _: None
    await handle.signal("resume")
    (cell,) = (await handle.result()).evaluations
    assert (cell.batch.failed, cell.batch.completed) == ({"engine_unavailable": 1}, 1)


NEEDED = [Activity.PLAN_TASKS, Activity.SEAL_BATCH, Activity.UPDATE_POLICY, Activity.PUBLISH_POLICY]


@pytest.mark.parametrize("step", NEEDED)
@pytest.mark.parametrize("evaluation", [{"splits": {}}, CONFIG["evaluation"]], ids=["run", "evaluation"])
async def test_a_step_that_fails_for_good_pauses_the_run_until_it_is_mended(
    stubs: StubActivities, start: Start, step: Activity, evaluation: dict[str, Any]
) -> None:
    stubs.broken = {step}
    handle = await start(training={"iterations": 1}, evaluation=evaluation)
    async with asyncio.timeout(30):
        while not (await progress(handle)).paused:
            await asyncio.sleep(0.05)
    assert f"failed: {step} is broken" in (await progress(handle)).phase
    assert stubs.reached[step] == 1
    await handle.signal("resume")
    await until(lambda: stubs.reached[step] == 2)
    async with asyncio.timeout(30):
        while not (await progress(handle)).paused:
            await asyncio.sleep(0.05)
    stubs.broken = set()
    await handle.signal("resume")
    assert (await handle.result()).version == 1
    assert [request.iteration for request in stubs.trained] == [0]


@pytest.mark.parametrize("step", NEEDED)
async def test_a_run_whose_step_fails_can_be_stopped(stubs: StubActivities, start: Start, step: Activity) -> None:
    stubs.broken = {step}
    handle = await start(training={"iterations": 2}, evaluation={"splits": {}})
    async with asyncio.timeout(30):
        while not (await progress(handle)).paused:
            await asyncio.sleep(0.05)
    await handle.signal("stop", StopRequest(now=True))
    assert (await handle.result()).version == 0


async def test_an_evaluation_follows_the_window_of_its_run(stubs: StubActivities, start: Start) -> None:
    stubs.gate.clear()
    handle = await start(rollout={**CONFIG["rollout"], "concurrency": 1})
    await until(lambda: stubs.running == 1)
    await handle.execute_update("set_concurrency", ConcurrencyRequest(rollouts=2), result_type=int)
    await until(lambda: stubs.running == 2)
    assert stubs.sealed == []
    stubs.gate.set()
    assert (await handle.result()).version == 2


async def test_a_paused_run_begins_no_evaluation(stubs: StubActivities, start: Start) -> None:
    stubs.gate.clear()
    handle = await start(training={"iterations": 1}, warm_start={"tasks": "/demonstrations"})
    await until(lambda: stubs.running == 2)
    await handle.signal("pause", PauseRequest(reason="lunch"))
    stubs.gate.set()
    await until(lambda: stubs.published[-1:] == [1])
    assert (await progress(handle)).phase == "paused: lunch"
    assert [seal.batch for seal in stubs.sealed] == ["iteration=000000"]
    await handle.signal("resume")
    assert (await handle.result()).version == 2


async def test_a_paused_run_starts_nothing_and_goes_on(stubs: StubActivities, start: Start) -> None:
    stubs.gate.clear()
    handle = await start(evaluation={"splits": {}})
    await until(lambda: stubs.running == 2)
    await handle.signal("pause", PauseRequest(reason="lunch"))
    stubs.gate.set()
    async with asyncio.timeout(30):
        while (await progress(handle)).in_flight.running:
            await asyncio.sleep(0.05)
    found = await progress(handle)
    assert (found.phase, found.in_flight.started) == ("paused: lunch", 2)
    await handle.signal("resume")
    assert (await handle.result()).version == 2


async def test_a_graceful_stop_finishes_the_iteration_and_measures(stubs: StubActivities, start: Start) -> None:
    stubs.gate.clear()
    handle = await start(training={"iterations": 50}, evaluation={"splits": {"held_out": "/held"}, "modes": {"sampled": 1.0}})
    await until(lambda: stubs.running == 2)
    stubs.gate.set()
    await until(lambda: len(stubs.trained) == 1)
    await handle.signal("stop", StopRequest())
    result = await handle.result()
    assert result.version == len(stubs.trained) < 50
    assert result.evaluations[-1].batch.version == result.version


async def test_stop_now_cancels_what_is_in_flight_and_cleans_up(stubs: StubActivities, start: Start) -> None:
    stubs.gate.clear()
    handle = await start(evaluation={"splits": {}})
    await until(lambda: stubs.running == 2)
    await handle.signal("stop", StopRequest(now=True))
    result = await handle.result()
    assert result.version == 0
    assert stubs.trained == []
    assert [entry.ending.outcome for entry in stubs.sealed[0].results] == [Outcome.CANCELLED] * 2
    assert stubs.sealed[0].started == 2
    assert stubs.open_sandboxes == set()


async def test_a_run_can_be_extended_while_it_runs(stubs: StubActivities, start: Start) -> None:
    stubs.gate.clear()
    handle = await start(evaluation={"splits": {}})
    await until(lambda: stubs.running == 2)
    assert await handle.execute_update("extend", ExtendRequest(iterations=2), result_type=int) == 4
    assert await handle.execute_update("set_concurrency", ConcurrencyRequest(rollouts=4), result_type=int) == 4
    await until(lambda: stubs.running == 4)
    stubs.gate.set()
    assert (await handle.result()).version == 4


async def test_a_run_that_stops_cannot_be_extended(stubs: StubActivities, start: Start) -> None:
    stubs.gate.clear()
    handle = await start(evaluation={"splits": {}})
    await until(lambda: stubs.running == 2)
    await handle.signal("stop", StopRequest())
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await handle.execute_update("extend", ExtendRequest(iterations=2))
    assert "the run is stopping" in str(caught.value.cause)
    stubs.gate.set()
    await handle.result()


async def test_the_state_survives_continue_as_new(stubs: StubActivities, client: Client, start: Start) -> None:
    handle = await start(training={"iterations": 3}, evaluation={"splits": {}})
    whole = await handle.result()
    state = {"iteration": 1, "last_iteration": 3, "cursor": 2, "iterations": [whole.iterations[0].model_dump()], "started_at": 1.0}
    stubs.plans.clear()
    name = whole.run
    config = RunConfig.model_validate({**CONFIG, "name": name, "training": {"iterations": 3}, "evaluation": {"splits": {}}})
    request = TrainingRunInput.model_validate({"config": config.model_dump(), "state": state})
    resumed = await client.execute_workflow(Workflow.TRAINING_RUN, request, id=name, task_queue=QUEUE, result_type=type(whole))
    assert [plan.cursor for plan in stubs.plans] == [2, 4]
    assert [entry.iteration for entry in resumed.iterations] == [0, 1, 2]


async def test_what_preflight_finds_fails_the_run_before_any_rollout(stubs: StubActivities, start: Start) -> None:
    with pytest.raises(WorkflowFailureError) as caught:
        await (await start(tasks="/missing")).result()
    assert "no such directory of tasks" in str(caught.value.cause.__cause__)  # type: ignore[union-attr]
    assert stubs.plans == []


async def test_a_workflow_id_that_is_not_the_runs_name_is_refused(stubs: StubActivities, client: Client) -> None:
    with pytest.raises(WorkflowFailureError) as caught:
        await client.execute_workflow(Workflow.TRAINING_RUN, {"config": CONFIG}, id="another-name", task_queue=QUEUE)
    assert "they must be the same" in str(caught.value.cause)


async def test_the_ui_shows_a_table_and_the_run_can_be_found(stubs: StubActivities, client: Client, start: Start) -> None:
    handle = await start(description="It learns to fly.")
    await handle.result()
    details = await handle.query("__temporal_workflow_metadata")
    page = str(details).replace("\N{NO-BREAK SPACE}", " ").replace(r"\xa0", " ")
    assert "learns to fly" in page
    assert "| iteration | kind | reward |" in page
    description = await handle.describe()
    attributes = {pair.key.name: pair.value for pair in description.typed_search_attributes}
    assert attributes["OpenForgePhase"] == "finished"
    assert attributes["OpenForgeIteration"] == 2
