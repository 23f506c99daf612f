"""`Evaluation`: measure one policy version on every split and in every sampling mode of a config.

Every task of a split is tried `rollouts_per_task` times, in the order of its name, so that two evaluations are paired task by task.
"""

import asyncio
from contextlib import suppress
from functools import partial

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from contracts.identity import evaluation_batch
    from contracts.rollouts import TaskPlan
    from contracts.runs import EvaluationInput, EvaluationResult, EvaluationSummary, InFlight, PauseRequest, Progress, Workflow
    from contracts.updates import PublishRequest
    from workflows import calls
    from workflows.batch import Batch, rollout_specs
    from workflows.control import Control, Controlled, StoppedError


@workflow.defn(name=Workflow.EVALUATION)
class Evaluation(Controlled):
    """See the module."""

    @workflow.init
    def __init__(self, request: EvaluationInput) -> None:
        rollout = request.config.rollout
        self.control = Control(request.concurrency or rollout.concurrency, rollout.pause_after_failures)
        self._request = request
        self._cells: list[EvaluationSummary] = []
        self._batch: Batch | None = None
        self._started = workflow.now().timestamp()

    @workflow.run
    async def run(self, request: EvaluationInput) -> EvaluationResult:
        self._telling = asyncio.create_task(self._tell_parent())
        with suppress(StoppedError):
            await self._measure(request)
        return EvaluationResult(version=request.version, cells=self._cells)

    async def _measure(self, request: EvaluationInput) -> None:
        config, evaluation, insist = request.config, request.config.evaluation, self.control.insist
        publish = PublishRequest(run=config.name, version=request.version, base_model=config.policy.model)
        await insist(f"publishing version {request.version}", lambda: calls.publish_policy(publish), self.show)
        for split, directory in evaluation.splits.items():
            plan = TaskPlan(tasks=directory, seed=config.seed, cursor=0, groups=None)
            planned = await insist("planning tasks", partial(calls.plan_tasks, plan), self.show)
            for mode, temperature in evaluation.modes.items():
                if self.control.stop_now:
                    break
                specs = rollout_specs(
                    config,
                    evaluation_batch(request.version, split, mode),
                    planned.tasks,
                    evaluation.rollouts_per_task if temperature > 0 else 1,
                    engine="policy",
                    policy=config.name,
                    sampling=config.rollout.sampling.model_copy(update={"temperature": temperature}),
                )
                self._batch = Batch(self.control, specs, publish, self.show)
                self._cells.append(EvaluationSummary(split=split, mode=mode, batch=await self._batch.run(request.version)))
                self.show()

    async def _tell_parent(self) -> None:
        """A streak of failures pauses the run that measures as well: it shows there, and a resume there goes on here."""
        parent = workflow.info().parent
        while parent:
            await workflow.wait_condition(lambda: self.control.paused_by_failures)
            run = workflow.get_external_workflow_handle(parent.workflow_id)
            await run.signal("pause", PauseRequest(reason=self.control.pause_reason))
            await workflow.wait_condition(lambda: not self.control.paused)

    @workflow.query(description="What has been measured and what is being measured.")
    def progress(self) -> Progress:
        paused = self.control.paused
        return Progress(
            run=self._request.config.name,
            phase=f"paused: {self.control.pause_reason}" if paused else "evaluation",
            iteration=self._request.version,
            iterations=self._request.version,
            version=self._request.version,
            in_flight=self._batch.in_flight if self._batch else InFlight(),
            iterations_done=[],
            evaluations=self._cells,
            started_at=self._started,
            paused=paused,
            stopping=self.control.stopping,
        )

    def show(self) -> None:
        lines = [f"**paused: {self.control.pause_reason}**\n"] if self.control.paused else []
        lines += ["| split | mode | reward | rollouts |", "|---|---|---|---|"]
        for cell in self._cells:
            mean = cell.batch.reward_mean
            lines.append(f"| {cell.split} | {cell.mode} | {'–' if mean is None else f'{mean:.3f}'} | {cell.batch.started} |")
        if self._batch:
            flight = self._batch.in_flight
            lines.append(f"\n{flight.batch}: {flight.started}/{flight.of} started, {flight.running} running, {flight.failed} failed")
        workflow.set_current_details("\n".join(lines))
