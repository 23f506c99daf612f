"""`openforge tasks`: check task directories, and what their oracle and their verifier say."""

import asyncio
import json
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from activities.harnesses import get_harness
from activities.harnesses.base import HarnessContext
from activities.rewards import verify
from activities.sandboxes import open_backend
from activities.sandboxes.base import SandboxBackend, SandboxSpec
from activities.tasks import Task, TaskError, load_task, prepare
from contracts.config import HarnessConfig
from contracts.failures import RolloutError
from infra.settings import Settings

app = typer.Typer(no_args_is_help=True)
console = Console()


@app.callback()
def _tasks() -> None:
    """Read and check task directories."""


@dataclass
class Finding:
    """What was found out about a directory. Rewards are none where they were not measured, or the verifier gave none."""

    path: str
    name: str = ""
    problem: str = ""
    warnings: tuple[str, ...] = ()
    base: str = ""
    oracle: float | None = None
    nothing: float | None = None
    oracle_problem: str = ""
    nothing_problem: str = ""


@app.command()
def validate(
    directories: Annotated[list[Path], typer.Argument(help="Task directories, or directories of them.")],
    oracle: Annotated[bool, typer.Option("--oracle", help="Also run the solution, then nothing, and show both rewards.")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Check task directories in Harbor's format; exit code 1 if one is not valid.

    Local sandboxes have no image builder: a plain Debian, Ubuntu or Python base stands for this machine's own system. A solution that
    gets 1 and doing nothing that gets 0 are a good sign, and no proof that a task is sound.
    """
    findings = asyncio.run(_validate([task for directory in directories for task in _expand(directory)], oracle))
    if as_json:
        console.print_json(json.dumps([asdict(finding) for finding in findings]))
    else:
        _show(findings, oracle)
    if any(finding.problem or finding.oracle_problem for finding in findings):
        raise typer.Exit(1)


def _expand(directory: Path) -> list[Path]:
    if (directory / "task.toml").exists():
        return [directory]
    return sorted(file.parent for file in directory.glob("*/task.toml")) or [directory]


async def _validate(paths: list[Path], oracle: bool) -> list[Finding]:
    findings = []
    with tempfile.TemporaryDirectory(prefix="openforge-tasks-") as home, console.status("checking") as status:
        backend = open_backend("bubblewrap", Settings(home=Path(home), proxy_socket=None))
        for path in paths:
            status.update(f"checking {path}")
            finding = Finding(str(path))
            findings.append(finding)
            try:
                task = load_task(path)
            except TaskError as error:
                finding.problem = str(error)
                continue
            finding.name, finding.warnings, finding.base = task.name, task.warnings, task.image.base
            if oracle:
                if task.solution:
                    finding.oracle, finding.oracle_problem = await _reward(backend, task, solve=True)
                else:
                    finding.oracle_problem = "it has no solution/solve.sh"
                finding.nothing, finding.nothing_problem = await _reward(backend, task, solve=False)
    return findings


async def _reward(backend: SandboxBackend, task: Task, *, solve: bool) -> tuple[float | None, str]:
    """(reward, problem) of the solution, or of doing nothing."""
    sandbox = f"validate-{uuid.uuid4().hex[:10]}"
    timeout = task.agent_timeout or 3600.0
    spec = SandboxSpec(
        id=sandbox,
        owner={"purpose": "validate"},
        image=task.image.base,
        cpus=task.cpus or 1,
        memory_mb=task.memory_mb or 2048,
        pids=512,
        file_size_mb=1024,
        deadline=time.time() + timeout + task.verifier_timeout + 60,
        workdir=task.image.workdir,
        env=task.image.env,
    )
    harness = get_harness(HarnessConfig(name="oracle"))
    context = HarnessContext(instruction=task.instruction, workdir=task.image.workdir, api_key=SecretStr(""), solution=task.solution)
    try:
        await backend.create(spec)
        await prepare(backend, sandbox, task)
        if solve:
            await backend.put(sandbox, harness.files(context))
            done = await backend.exec(sandbox, harness.command(context), env=task.solution_env, timeout=timeout)
            if done.timed_out:
                return None, f"the solution ran past {timeout:g} s"
        return (await verify(backend, sandbox, task)).reward, ""
    except RolloutError as error:
        return None, f"{error.cause}: {error}"
    finally:
        await backend.destroy(sandbox)


def _show(findings: list[Finding], oracle: bool) -> None:
    view = Table("", "task", "base (the host's system stands for it)", *(["oracle", "nothing"] if oracle else []), box=None)
    for finding in findings:
        mark = "[red]✗[/]" if finding.problem or finding.oracle_problem else "[green]✓[/]"
        rewards = [_number(finding.oracle), _number(finding.nothing)] if oracle else []
        view.add_row(mark, finding.name or finding.path, finding.base, *rewards)
    console.print(view)
    for finding in findings:
        for problem in filter(None, (finding.problem, finding.oracle_problem, finding.nothing_problem)):
            console.print(f"{finding.name or finding.path}: {problem}", highlight=False, style="red", soft_wrap=True)
        for warning in finding.warnings:
            console.print(f"warning: {warning}", highlight=False, style="yellow", soft_wrap=True)
    bad = sum(bool(finding.problem or finding.oracle_problem) for finding in findings)
    console.print(f"{len(findings) - bad} of {len(findings)} tasks are valid")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"
