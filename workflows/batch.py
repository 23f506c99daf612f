"""A batch of rollouts: child workflows in a sliding window, every one of them in the ledger when it is sealed."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta

from temporalio import workflow
from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes
from temporalio.exceptions import ChildWorkflowError, FailureError, is_cancelled_exception
from temporalio.workflow import ChildWorkflowCancellationType, ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from contracts.batches import BatchSummary, SealBatch
    from contracts.config import RunConfig
    from contracts.failures import Cause, Outcome
    from contracts.identity import RolloutId
    from contracts.rollouts import Ending, RolloutResult, RolloutSpec, TaskRef
    from contracts.runs import QUEUE, InFlight, SearchAttribute, Workflow
    from contracts.sessions import Sampling
    from contracts.updates import PublishRequest
    from workflows import calls
    from workflows.control import Control, StoppedError

RUN = SearchAttributeKey.for_keyword(SearchAttribute.RUN)
BATCH = SearchAttributeKey.for_keyword(SearchAttribute.BATCH)
TASK = SearchAttributeKey.for_keyword(SearchAttribute.TASK)

# An engine that its supervisor started again has lost the weights; the proxy lets calls wait until they are back. The pause between two
# looks grows with the time already watched, so that a batch of days does not fill its history with looks.
WATCH_ENGINES = timedelta(seconds=20)
WATCHED_SHARE = 30


def rollout_specs(
    config: RunConfig, batch: str, tasks: Iterable[TaskRef], members: int, *, engine: str, policy: str, sampling: Sampling
) -> list[RolloutSpec]:
    """`members` rollouts of every task; the tasks are the groups."""
    return [
        RolloutSpec(
            rollout=RolloutId(run=config.name, batch=batch, group=group, member=member),
            task=task,
            harness=config.harness,
            sandbox=config.sandbox,
            engine=engine,
            policy=policy,
            sampling=sampling,
            limits=config.rollout.limits,
            max_context=config.policy.max_context,
            max_attempts=config.rollout.max_attempts,
        )
        for group, task in enumerate(tasks)
        for member in range(members)
    ]


class Batch:
    """Runs the rollouts of one batch and seals it.

    `in_flight` is kept up to date for the progress query; `changed` is called whenever it changes.
    """

    def __init__(self, control: Control, specs: list[RolloutSpec], publish: PublishRequest | None, changed: Callable[[], None]) -> None:
        self._control = control
        self._specs = specs
        self._publish = publish
        self._changed = changed
        self._results: list[RolloutResult] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.in_flight = InFlight(batch=specs[0].rollout.batch if specs else "", of=len(specs))

    async def run(self, version: int) -> BatchSummary:
        """Start every rollout as the window allows, wait for all, seal. `stop now` ends it early: what has begun is cancelled."""
        started = workflow.now()
        watch = asyncio.create_task(self._watch_engines(self._publish)) if self._publish else None
        try:
            for spec in self._specs:
                await workflow.wait_condition(self._may_start)
                if self._control.stop_now:
                    break
                self.in_flight.started += 1
                self.in_flight.running += 1
                self._tasks.add(asyncio.create_task(self._one(spec)))
                self._changed()
            await workflow.wait_condition(lambda: self.in_flight.running == 0 or self._control.stop_now)
            if self._control.stop_now:
                for task in self._tasks:
                    task.cancel()
            await workflow.wait_condition(lambda: self.in_flight.running == 0)
        finally:
            if watch:
                watch.cancel()
        run, batch = self._specs[0].rollout.run, self.in_flight.batch
        ordered = sorted(self._results, key=lambda result: (result.rollout.group, result.rollout.member))
        seconds = (workflow.now() - started).total_seconds()
        request = SealBatch(run=run, batch=batch, version=version, started=self.in_flight.started, seconds=seconds, results=ordered)
        return await self._control.insist(f"sealing {batch}", lambda: calls.seal_batch(request), self._changed)

    def _may_start(self) -> bool:
        control = self._control
        return control.stop_now or (not control.paused and self.in_flight.running < control.concurrency)

    async def _one(self, spec: RolloutSpec) -> None:
        rollout = spec.rollout
        try:
            result = await workflow.execute_child_workflow(
                Workflow.ROLLOUT,
                spec,
                id=rollout.workflow_id,
                result_type=RolloutResult,
                task_queue=QUEUE,
                cancellation_type=ChildWorkflowCancellationType.WAIT_CANCELLATION_COMPLETED,
                parent_close_policy=ParentClosePolicy.REQUEST_CANCEL,
                static_summary=f"{spec.task.name} with {spec.harness.name}",
                search_attributes=TypedSearchAttributes(
                    [
                        SearchAttributePair(RUN, rollout.run),
                        SearchAttributePair(BATCH, rollout.batch),
                        SearchAttributePair(TASK, spec.task.name),
                    ]
                ),
            )
        except (FailureError, asyncio.CancelledError) as error:
            result = RolloutResult(rollout=rollout, task=spec.task.name, ending=_ending(error), attempts=1)
        self._results.append(result)
        self._count(result)
        self._control.note(result)
        self._tasks.discard(asyncio.current_task())
        self._changed()

    def _count(self, result: RolloutResult) -> None:
        flight, outcome = self.in_flight, result.ending.outcome
        flight.running -= 1
        flight.completed += outcome is Outcome.COMPLETED
        flight.truncated += outcome is Outcome.TRUNCATED
        flight.failed += outcome is Outcome.FAILED
        if result.reward is not None:
            flight.reward_sum += result.reward
            flight.rewarded += 1

    async def _watch_engines(self, publish: PublishRequest) -> None:
        watched = timedelta()
        with suppress(StoppedError):
            while True:
                interval = max(WATCH_ENGINES, watched / WATCHED_SHARE)
                await workflow.sleep(interval)
                watched += interval
                await workflow.wait_condition(lambda: self.in_flight.running > 0)  # a pause of a week is not a week of looks
                what = f"publishing version {publish.version} again"
                await self._control.insist(what, lambda: calls.publish_policy(publish), self._changed)


def _ending(error: BaseException) -> Ending:
    if is_cancelled_exception(error):
        return Ending(outcome=Outcome.CANCELLED, message="cancelled before it began")
    cause = error.__cause__ if isinstance(error, ChildWorkflowError) else error
    return Ending(outcome=Outcome.FAILED, cause=Cause.INTERNAL, message=str(cause)[:1000])
