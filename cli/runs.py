"""Commands on runs: see, steer, measure, report."""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from temporalio.client import WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.service import RPCError, RPCStatusCode

from cli import progress, reports
from cli.options import DEFAULT_HOME, Home, RecipeArgument, Run, Set
from cli.problems import UserError
from cli.recipes import load_recipe, parse_changes
from cli.stack import ensure_up
from cli.state import read_state, stack_settings
from cli.train import connect_or_explain
from contracts.config import HarnessConfig, RunConfig
from contracts.identity import RolloutId
from contracts.rollouts import RolloutResult, RolloutSpec, TaskRef
from contracts.runs import (
    QUEUE,
    EvaluationInput,
    EvaluationResult,
    ExtendRequest,
    PauseRequest,
    StopRequest,
    Workflow,
)
from infra.storage import Storage, StorageError

console = Console()


def status(run: Annotated[str | None, typer.Argument(help="Name of a run; none: list all.")] = None, home: Home = DEFAULT_HOME) -> None:
    """Show a run, or list all."""
    asyncio.run(_status(run, home))


async def _status(run: str | None, home: Path) -> None:
    settings = stack_settings(home)
    client = await connect_or_explain(settings)
    if run is None:
        view = Table("run", "state", "started", box=None)
        async for execution in client.list_workflows(f"WorkflowType = '{Workflow.TRAINING_RUN}'"):
            state = execution.status.name.lower() if execution.status else "?"
            view.add_row(execution.id, state, execution.start_time.astimezone().strftime("%Y-%m-%d %H:%M"))
        console.print(view)
        return
    try:
        found = await progress.ask(client, run)
    except RPCError as error:
        raise _unknown(run, error) from None
    console.print(progress.panel(found, run, progress.link(read_state(home), settings, run)))


def pause(run: Run, reason: Annotated[str, typer.Option(help="Shown in the UI.")] = "asked for", home: Home = DEFAULT_HOME) -> None:
    """Start no new rollouts until `resume`; those in flight go on."""
    _signal(run, home, "pause", PauseRequest(reason=reason))


def resume(run: Run, home: Home = DEFAULT_HOME) -> None:
    """Go on after a pause."""
    _signal(run, home, "resume")


def stop(
    run: Run,
    now: Annotated[bool, typer.Option("--now", help="Cancel the rollouts in flight; the iteration in hand is not trained.")] = False,
    home: Home = DEFAULT_HOME,
) -> None:
    """Finish the iteration in hand, make the final evaluation, and stop."""
    _signal(run, home, "stop", StopRequest(now=now))


def extend(run: Run, iterations: Annotated[int, typer.Argument(min=1)], home: Home = DEFAULT_HOME) -> None:
    """Add iterations to a run that is running."""

    async def send() -> int:
        client = await connect_or_explain(stack_settings(home))
        try:
            handle = client.get_workflow_handle(run)
            total: int = await handle.execute_update("extend", ExtendRequest(iterations=iterations), result_type=int)
        except RPCError as error:
            raise _unknown(run, error) from None
        except WorkflowUpdateFailedError as error:
            raise UserError(str(error.cause)) from None
        return total

    console.print(f"{run} has {asyncio.run(send())} iterations now")


def _signal(run: str, home: Path, name: str, *arguments: Any) -> None:
    async def send() -> None:
        client = await connect_or_explain(stack_settings(home))
        try:
            await client.get_workflow_handle(run).signal(name, args=list(arguments))
        except RPCError as error:
            raise _unknown(run, error) from None

    asyncio.run(send())
    console.print(f"{name}: {run} has been told")


def evaluate(
    run: Run,
    version: Annotated[int | None, typer.Option(help="Policy version; none: the latest.")] = None,
    home: Home = DEFAULT_HOME,
) -> None:
    """Measure a version of a run on its evaluation splits. The engines must be free: no run may be training with them."""
    asyncio.run(_evaluate(run, version, home))


async def _evaluate(run: str, version: int | None, home: Path) -> None:
    settings = stack_settings(home)
    client = await connect_or_explain(settings)
    storage = Storage.of(settings)
    config = read_config(storage, run)
    if not config.evaluation.splits:
        raise UserError(f"run {run} has no evaluation splits in its config")
    chosen = reports.latest_version(storage, run) if version is None else version
    handle = await client.start_workflow(
        Workflow.EVALUATION,
        EvaluationInput(config=config, version=chosen),
        id=f"{run}/evaluation={chosen:06d}/{int(time.time())}",
        task_queue=QUEUE,
        result_type=EvaluationResult,
    )
    link = progress.link(read_state(home), settings, handle.id)
    console.print(f"measuring version {chosen}: {link}")
    await progress.follow(client, handle.id, link)
    result = await handle.result()
    view = Table("split", "mode", "reward", "rollouts", box=None)
    for cell in result.cells:
        mean = cell.batch.reward_mean
        view.add_row(cell.split, cell.mode, "–" if mean is None else f"{mean:.3f}", str(cell.batch.started))
    console.print(view)


def rollout(
    recipe: RecipeArgument,
    task: Annotated[Path, typer.Option(help="Task directory.")],
    harness: Annotated[str | None, typer.Option(help="Harness in place of the recipe's.")] = None,
    engine: Annotated[str, typer.Option(help="Engine pool that answers.")] = "policy",
    change: Set = None,
    home: Home = DEFAULT_HOME,
) -> None:
    """Make one rollout of one task and print everything about it."""
    loaded = load_recipe(recipe, home, changes=parse_changes(change or []))
    if not (task / "task.toml").is_file():
        raise UserError(f"{task}: there is no task.toml")
    ensure_up(loaded, home, [str(recipe)])
    asyncio.run(_rollout(loaded.config, task, harness, engine, home))


async def _rollout(config: RunConfig, task: Path, harness: str | None, engine: str, home: Path) -> None:
    from activities.harnesses import get_harness
    from activities.tasks import TaskError, load_task
    from cli.trajectories import render

    try:
        chosen = HarnessConfig(name=harness) if harness else config.harness
        get_harness(chosen)
        loaded = load_task(task)
    except (ValueError, TaskError) as error:
        raise UserError(str(error)) from None
    settings = stack_settings(home)
    client = await connect_or_explain(settings)
    identity = RolloutId(run=config.name, batch=f"single={int(time.time())}", group=0, member=0)
    spec = RolloutSpec(
        rollout=identity,
        task=TaskRef(name=loaded.name, path=str(loaded.path), digest=loaded.digest()),
        harness=chosen,
        sandbox=config.sandbox,
        engine=engine,
        policy=config.name if engine == "policy" else engine,
        sampling=config.rollout.sampling,
        limits=config.rollout.limits,
        max_context=config.policy.max_context,
        max_attempts=1,
    )
    with console.status(f"{chosen.name} on {loaded.name}: {progress.link(read_state(home), settings, identity.workflow_id)}"):
        try:
            result = await client.execute_workflow(
                Workflow.ROLLOUT, spec, id=identity.workflow_id, task_queue=QUEUE, result_type=RolloutResult
            )
        except WorkflowFailureError as error:
            raise UserError(f"the rollout failed: {error.cause}") from None
    if result.trajectory:
        render(Storage.of(settings), result.trajectory.path, console)
    console.print_json(result.model_dump_json(exclude_none=True))


def report(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON and write nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="Directory of the report; default: reports/RUN.")] = None,
    home: Home = DEFAULT_HOME,
) -> None:
    """Rewards, outcomes, tokens and seconds of a run; writes a PNG and a self-contained HTML with the curves.

    It reads storage alone, so it works while the stack is stopped.
    """
    storage = _storage(home)
    if as_json:
        console.print_json(json.dumps(reports.collect(storage, run).as_dict()))
        return
    written = reports.write(storage, run, out or Path("reports") / run)
    console.print(written.text(), soft_wrap=True, highlight=False)
    console.print(f"report: {written.directory}/report.html")


def _storage(home: Path) -> Storage:
    try:
        return Storage.of(stack_settings(home))
    except StorageError as error:
        raise UserError(str(error)) from error


def read_config(storage: Storage, run: str) -> RunConfig:
    """The config that a run was started with. Raises UserError."""
    try:
        return RunConfig.model_validate(json.loads(storage.read(f"runs/{run}/run.json"))["config"])
    except FileNotFoundError:
        raise UserError(f"there is no run {run!r} in {storage.root}; known: {', '.join(reports.known_runs(storage)) or 'none'}") from None


def _unknown(run: str, error: RPCError) -> UserError:
    if error.status is RPCStatusCode.NOT_FOUND:
        return UserError(f"there is no run {run!r} that is running; 'openforge status' lists all")
    return UserError(f"run {run}: {error.message}")
