"""A run hands itself on before its history grows long. A server of its own, which suggests it after few events."""

import pytest
from temporalio.client import WorkflowExecutionStatus
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from contracts.config import RunConfig
from contracts.runs import QUEUE, SANDBOX_QUEUE, TRAINER_QUEUE, RunResult, TrainingRunInput, Workflow
from infra.temporal import ensure_search_attributes
from tests.support.processes import BASE_PYTHON
from tests.workflows.stubs import CONFIG, StubActivities
from workflows.evaluation import Evaluation
from workflows.rollout import Rollout
from workflows.training_run import TrainingRun


@pytest.mark.asyncio
async def test_a_long_run_is_handed_on_between_iterations_and_loses_nothing() -> None:
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(BASE_PYTHON.parent / "temporal"),
        dev_server_extra_args=["--dynamic-config-value", "limit.historyCount.suggestContinueAsNew=40"],
        data_converter=pydantic_data_converter,
    )
    stubs = StubActivities()
    runner = SandboxedWorkflowRunner(
        restrictions=SandboxRestrictions.default.with_passthrough_modules("contracts", "pydantic", "workflows")
    )
    config = RunConfig.model_validate({**CONFIG, "name": "long", "training": {"iterations": 4}})
    async with environment:
        client = environment.client
        await ensure_search_attributes(client)
        async with (
            Worker(client, task_queue=QUEUE, workflows=[TrainingRun, Rollout, Evaluation], workflow_runner=runner, activities=stubs.all),
            Worker(client, task_queue=SANDBOX_QUEUE, activities=stubs.all),
            Worker(client, task_queue=TRAINER_QUEUE, activities=stubs.all),
        ):
            handle = await client.start_workflow(
                Workflow.TRAINING_RUN, TrainingRunInput(config=config), id="long", task_queue=QUEUE, result_type=RunResult
            )
            result = await handle.result()
            first = await client.get_workflow_handle("long", run_id=handle.first_execution_run_id).describe()
    assert first.status is WorkflowExecutionStatus.CONTINUED_AS_NEW
    assert [entry.iteration for entry in result.iterations] == [0, 1, 2, 3]
    assert [plan.cursor for plan in stubs.plans if plan.groups] == [0, 2, 4, 6]
    assert [cell.batch.version for cell in result.evaluations] == [0, 4]
    assert [request.iteration for request in stubs.trained] == [0, 1, 2, 3]
