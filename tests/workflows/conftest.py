"""A real Temporal development server for the session; each test has a worker with stub activities."""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest_asyncio
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
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

Start = Callable[..., Awaitable["WorkflowHandle[Any, RunResult]"]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(BASE_PYTHON.parent / "temporal"), data_converter=pydantic_data_converter
    )
    async with environment:
        await ensure_search_attributes(environment.client)
        yield environment.client


@pytest_asyncio.fixture(loop_scope="module")
async def stubs(client: Client) -> AsyncIterator[StubActivities]:
    """The activities of this test, served by workers of the real workflows."""
    activities = StubActivities()
    runner = SandboxedWorkflowRunner(
        restrictions=SandboxRestrictions.default.with_passthrough_modules("contracts", "pydantic", "workflows")
    )
    async with (
        Worker(client, task_queue=QUEUE, workflows=[TrainingRun, Rollout, Evaluation], workflow_runner=runner, activities=activities.all),
        Worker(client, task_queue=SANDBOX_QUEUE, activities=activities.all),
        Worker(client, task_queue=TRAINER_QUEUE, activities=activities.all),
    ):
        yield activities


@pytest_asyncio.fixture(loop_scope="module")
async def start(client: Client) -> AsyncIterator[Start]:
    """Start a run of `CONFIG` with changes, under a name of its own."""

    async def begin(**changes: Any) -> "WorkflowHandle[Any, RunResult]":
        name = f"run-{uuid.uuid4().hex[:8]}"
        config = RunConfig.model_validate({**CONFIG, **changes, "name": name})
        handle = await client.start_workflow(
            Workflow.TRAINING_RUN, TrainingRunInput(config=config), id=name, task_queue=QUEUE, result_type=RunResult
        )
        started.append(handle)
        return handle

    started: list[WorkflowHandle[Any, RunResult]] = []
    yield begin
    for handle in started:  # a test that failed must not leave rollouts to the next one's worker
        if (await handle.describe()).status is WorkflowExecutionStatus.RUNNING:
            await handle.terminate()
