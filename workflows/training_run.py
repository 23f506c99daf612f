"""`TrainingRun`: iterations of rollouts, update and publication, from version 0 to the last, with evaluations in between.

Invariants:
1. Iteration i samples with version i and makes version i + 1. All that decides what comes next is in `RunState`, which is what
   survives continue-as-new; it is handed on only between iterations, when no rollout is in flight.
2. Tasks are planned from (seed, cursor), and the cursor moves by one batch for each iteration: each prompt is trained exactly once an
   epoch, whatever crashes.
3. The batch is sealed before it is trained on, trained on before it is published.
"""

from contextlib import suppress

from temporalio import workflow
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ApplicationError
from temporalio.workflow import ChildWorkflowCancellationType

with workflow.unsafe.imports_passed_through():
    from contracts.batches import BatchSummary
    from contracts.identity import iteration_batch
    from contracts.rollouts import TaskPlan
    from contracts.runs import (
        QUEUE,
        EvaluationInput,
        EvaluationResult,
        ExtendRequest,
        InFlight,
        IterationSummary,
        PauseRequest,
        Progress,
        RunResult,
        RunState,
        SearchAttribute,
        StopRequest,
        TrainingRunInput,
        Workflow,
    )
    from contracts.updates import PublishRequest, UpdateRequest, UpdateResult
    from workflows import calls, details
    from workflows.batch import Batch, rollout_specs
    from workflows.control import Control, Controlled, StoppedError

ITERATION = SearchAttributeKey.for_int(SearchAttribute.ITERATION)
PHASE = SearchAttributeKey.for_keyword(SearchAttribute.PHASE)
REWARD = SearchAttributeKey.for_float(SearchAttribute.REWARD)
RUN = SearchAttributeKey.for_keyword(SearchAttribute.RUN)


@workflow.defn(name=Workflow.TRAINING_RUN)
class TrainingRun(Controlled):
    """See the module. Its id is the run's name, so a name runs once at a time."""

    @workflow.init
    def __init__(self, request: TrainingRunInput) -> None:
        config = request.config
        self._config = config
        self._state = request.state or RunState(started_at=workflow.now().timestamp())
        if self._state.last_iteration is None:
            self._state.last_iteration = config.training.iterations + (config.warm_start is not None)
        self.control = Control(
            self._state.concurrency or config.rollout.concurrency,
            config.rollout.pause_after_failures,
            paused=self._state.paused,
            reason=self._state.pause_reason,
        )
        self.control.stopping = self._state.stopping
        self._batch: Batch | None = None
        self._evaluation: workflow.ChildWorkflowHandle[object, EvaluationResult] | None = None
        self._phase = "starting"

    @workflow.run
    async def run(self, request: TrainingRunInput) -> RunResult:
        config, state = self._config, self._state
        if request.state is None:
            if workflow.info().workflow_id != config.name:
                raise ApplicationError(
                    f"the workflow's id is {workflow.info().workflow_id!r} and config.name is {config.name!r}; they must be the same",
                    type="bad_input",
                    non_retryable=True,
                )
            self._enter("preflight")
            state.harness_version = await calls.preflight(config)
        with suppress(StoppedError):
            await self._iterations()
        self._enter("finished")
        return RunResult(run=config.name, version=state.iteration, iterations=state.iterations, evaluations=state.evaluations)

    async def _iterations(self) -> None:
        config, state = self._config, self._state
        first_rl = int(config.warm_start is not None)
        while not self.control.stopping and state.iteration < self._last:
            if state.iteration == first_rl:
                await self._evaluate()
            await self._iterate()
            done = state.iteration - first_rl
            if config.evaluation.every and done > 0 and done % config.evaluation.every == 0 and state.iteration < self._last:
                await self._evaluate()
            if workflow.info().is_continue_as_new_suggested():
                self._hand_on()
        if not self.control.stop_now:
            await self._evaluate()

    @property
    def _last(self) -> int:
        assert self._state.last_iteration is not None
        return self._state.last_iteration

    async def _iterate(self) -> None:
        """Make the next version, unless `stop now` comes in between."""
        config, state = self._config, self._state
        number, started = state.iteration, workflow.now()
        warm = config.warm_start if number == 0 else None
        self._enter("demonstrations" if warm else "rollouts")
        publish = PublishRequest(run=config.name, version=number, base_model=config.policy.model)
        if warm:
            plan = TaskPlan(tasks=warm.tasks, seed=config.seed, cursor=0, groups=None)
        else:
            await self._publish(publish)
            plan = TaskPlan(tasks=config.tasks, seed=config.seed, cursor=state.cursor, groups=config.rollout.groups)
        planned = await self.control.insist("planning tasks", lambda: calls.plan_tasks(plan), self.show)
        specs = rollout_specs(
            config,
            iteration_batch(number),
            planned.tasks,
            warm.rollouts_per_task if warm else config.rollout.group_size,
            engine=warm.engine if warm else "policy",
            policy=warm.engine if warm else config.name,
            sampling=config.rollout.sampling,
        )
        self._batch = Batch(self.control, specs, None if warm else publish, self.show)
        batch = await self._batch.run(number)
        if self.control.stop_now:
            return
        update = await self._update(batch)
        self._enter("publish")
        await self._publish(publish.model_copy(update={"version": update.version}))
        state.cursor += 0 if warm else config.rollout.groups
        state.iteration = update.version
        seconds = (workflow.now() - started).total_seconds()
        state.iterations.append(
            IterationSummary(
                iteration=number,
                kind="warm start" if warm else "rl",
                batch=batch,
                update=update,
                seconds={"rollouts": batch.seconds, "update": sum(update.seconds.values()), "all": seconds},
            )
        )
        attributes = [ITERATION.value_set(state.iteration)]
        workflow.upsert_search_attributes([*attributes, *([REWARD.value_set(batch.reward_mean)] if batch.reward_mean is not None else [])])
        self.show()

    async def _update(self, batch: BatchSummary) -> UpdateResult:
        config, warm = self._config, self._config.warm_start if self._state.iteration == 0 else None
        self._enter("imitation" if warm else "update")
        request = UpdateRequest(
            run=config.name,
            iteration=self._state.iteration,
            manifest=batch.manifest,
            base_model=config.policy.model,
            seed=config.seed,
            max_context=config.policy.max_context,
            temperature=config.rollout.sampling.temperature,
            method=warm.sft if warm else config.training,
        )
        return await self.control.insist(f"the update of version {request.iteration}", lambda: calls.update_policy(request), self.show)

    async def _publish(self, request: PublishRequest) -> None:
        await self.control.insist(f"publishing version {request.version}", lambda: calls.publish_policy(request), self.show)

    async def _evaluate(self) -> None:
        """Measure the current version, once."""
        config, state = self._config, self._state
        version = state.iteration
        if not config.evaluation.splits or any(cell.batch.version == version for cell in state.evaluations):
            return
        await workflow.wait_condition(lambda: not self.control.paused or self.control.stop_now)
        if self.control.stop_now:
            return
        self._enter("evaluation")
        self._batch = None
        self._evaluation = await workflow.start_child_workflow(
            Workflow.EVALUATION,
            EvaluationInput(config=config, version=version, concurrency=self.control.concurrency),
            id=f"{config.name}/evaluation={version:06d}",
            result_type=EvaluationResult,
            task_queue=QUEUE,
            cancellation_type=ChildWorkflowCancellationType.WAIT_CANCELLATION_COMPLETED,
            static_summary=f"version {version} of {config.name}",
        )
        if self.control.paused:  # asked for while the evaluation was being started
            await self.pass_on("pause", PauseRequest(reason=self.control.pause_reason))
        if self.control.stop_now:
            await self.pass_on("stop", StopRequest(now=True))
        result = await self._evaluation
        self._evaluation = None
        state.evaluations += result.cells
        self.show()

    def _hand_on(self) -> None:
        """Continue as new with the state alone."""
        state = self._state
        state.concurrency, state.paused, state.pause_reason = self.control.concurrency, self.control.paused, self.control.pause_reason
        state.stopping = self.control.stopping
        workflow.continue_as_new(TrainingRunInput(config=self._config, state=state))

    async def pass_on(self, signal: str, *requests: object) -> None:
        if self._evaluation:
            with suppress(ApplicationError):  # it has ended, and we are about to hear of it
                await self._evaluation.signal(signal, args=list(requests))

    @workflow.update(description="So many more iterations; returns how many there are in all.")
    def extend(self, request: ExtendRequest) -> int:
        self._state.last_iteration = self._last + request.iterations
        self.show()
        return self._last

    @extend.validator
    def _may_extend(self, request: ExtendRequest) -> None:
        if self.control.stopping or self._phase == "finished":
            raise ApplicationError(f"the run is {'stopping' if self.control.stopping else 'finished'} and cannot be extended")

    @workflow.query(description="Iterations, rewards, what is in flight.")
    def progress(self) -> Progress:
        return Progress(
            run=self._config.name,
            phase=f"paused: {self.control.pause_reason}" if self.control.paused else self._phase,
            iteration=self._state.iteration,
            iterations=self._last,
            version=self._state.iteration,
            in_flight=self._batch.in_flight if self._batch else InFlight(),
            iterations_done=self._state.iterations,
            evaluations=self._state.evaluations,
            measuring=self._evaluation.id if self._evaluation else "",
            started_at=self._state.started_at,
            paused=self.control.paused,
            stopping=self.control.stopping,
        )

    def _enter(self, phase: str) -> None:
        self._phase = phase
        workflow.upsert_search_attributes([PHASE.value_set(phase), RUN.value_set(self._config.name)])
        self.show()

    def show(self) -> None:
        workflow.set_current_details(details.page(self.progress(), self._config.description))
