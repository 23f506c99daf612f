"""`openforge train`: start a run, or attach to it, and show how it goes."""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes
from temporalio.service import RPCError, RPCStatusCode

from cli import progress, reports
from cli.options import DEFAULT_HOME, Home, Name, RecipeArgument, Seed, Set
from cli.problems import UserError
from cli.recipes import Recipe, load_recipe, parse_changes
from cli.stack import ensure_up
from cli.state import read_state, stack_settings
from contracts.runs import QUEUE, RunResult, SearchAttribute, TrainingRunInput, Workflow
from infra.settings import Settings
from infra.storage import Storage, StorageError
from infra.temporal import connect

console = Console()


def train(
    recipe: RecipeArgument,
    name: Name = None,
    seed: Seed = None,
    change: Set = None,
    detach: Annotated[bool, typer.Option("--detach", help="Start it and return.")] = False,
    home: Home = DEFAULT_HOME,
) -> None:
    """Train a recipe's policy. Starts the local stack if none runs; attaches to a run of the same name that is running.

    Ctrl-C leaves the run running. At the end a report is written (see `openforge report`).

    **Example:** openforge train recipes/quickstart --seed 1 --name quickstart-1 --set training.iterations=4
    """
    began = time.monotonic()
    loaded = load_recipe(recipe, home, name=name, seed=seed, changes=parse_changes(change or []))
    arguments = [str(recipe), *(["--name", name] if name else []), *(["--seed", str(seed)] if seed is not None else [])]
    ensure_up(loaded, home, [*arguments, *(word for item in change or [] for word in ("--set", item))])
    settings = stack_settings(home)
    asyncio.run(_train(loaded, home, settings, detach))
    if not detach:
        console.print(f"this command took {progress.duration(time.monotonic() - began)}")


async def _train(recipe: Recipe, home: Path, settings: Settings, detach: bool) -> None:
    client = await connect_or_explain(settings)
    name = recipe.config.name
    handle = await _start(client, recipe, settings)
    link = progress.link(read_state(home), settings, name)
    console.print(f"run [bold]{name}[/]: {link}", soft_wrap=True)
    if detach:
        console.print(f"'openforge status {name}' shows it; 'openforge train' with the same recipe attaches to it")
        return
    try:
        await progress.follow(client, name, link)
        result = await handle.result()
    except WorkflowFailureError as error:
        raise UserError(f"run {name} failed: {_root(error)}") from None
    except asyncio.CancelledError:
        console.print(f"\nthe run goes on: 'openforge status {name}' shows it, 'openforge stop {name}' ends it, 'openforge down' stops all")
        raise KeyboardInterrupt from None
    report = await asyncio.to_thread(reports.write, Storage.of(settings), name, Path("reports") / name)
    console.print(report.text(), soft_wrap=True, highlight=False)
    console.print(f"report: {report.directory}/report.html", soft_wrap=True)
    assert result.version >= 0


async def _start(client: Client, recipe: Recipe, settings: Settings) -> WorkflowHandle[object, RunResult]:
    """Start the workflow, or find the one of this name that runs."""
    config = recipe.config
    handle: WorkflowHandle[object, RunResult] = client.get_workflow_handle(config.name, result_type=RunResult)
    try:
        status = (await handle.describe()).status
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
    else:
        if status is WorkflowExecutionStatus.RUNNING:
            console.print(f"run {config.name} is running: attaching to it")
            return handle
        raise UserError(f"run {config.name} has ended already ({status.name.lower() if status else '?'}); give another --name")
    storage = Storage.of(settings)
    try:
        storage.write(f"runs/{config.name}/run.json", json.dumps({"config": config.model_dump(mode="json")}, indent=1).encode())
    except StorageError as error:
        raise UserError(str(error)) from error
    return await client.start_workflow(
        Workflow.TRAINING_RUN,
        TrainingRunInput(config=config),
        id=config.name,
        task_queue=QUEUE,
        result_type=RunResult,
        static_summary=config.description or f"training run {config.name}",
        static_details=f"Recipe `{recipe.path.name}`, harness {config.harness.name}, {config.training.iterations} iterations of "
        f"{config.rollout.groups} × {config.rollout.group_size} rollouts.",
        search_attributes=TypedSearchAttributes([SearchAttributePair(SearchAttributeKey.for_keyword(SearchAttribute.RUN), config.name)]),
    )


async def connect_or_explain(settings: Settings) -> Client:
    """Raises UserError if Temporal does not answer."""
    try:
        return await connect(settings)
    except RuntimeError as error:
        raise UserError(
            f"Temporal does not answer at {settings.temporal_address}: start the local stack with 'openforge up', "
            "or set OPENFORGE_TEMPORAL_ADDRESS"
        ) from error


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)
