"""The supervisor of the local stack: starts its processes, watches them, starts again what dies, stops everything in the end.

Every child is a session of its own, recorded with its start time in HOME/stack.json, and is told by the kernel to end when the
supervisor dies. What is left of an earlier supervisor is ended before anything starts.
"""

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from activities.sandboxes import open_backend
from cli import components
from cli.components import Process
from cli.problems import UserError
from cli.recipes import Recipe, interpreter
from cli.state import Component, StackState, group_lives, read_state, start_time, stop_group, write_state
from infra.settings import Settings
from infra.storage import Storage, StorageError

HEALTH_PATIENCE = 300.0  # seconds until a process must be healthy: vLLM takes a minute on two cores
RESTARTS = 5  # in a row, each before it was healthy for a minute
_PR_SET_PDEATHSIG = 1


class Supervisor:
    """One stack in one directory. `changed` is called whenever there is something new to show."""

    def __init__(self, home: Path, recipe: Recipe, *, s3: bool, changed: Callable[[StackState], None] = lambda _: None) -> None:
        self._home = home
        self._recipe = recipe
        self._changed = changed
        self._stop = asyncio.Event()
        self.state = read_state(home)
        if self.state.running:
            raise UserError(f"a stack runs in {home} already (pid {self.state.pid}); 'openforge down' stops it")
        clear_leftovers(self.state)
        self.state.s3 = s3
        self.state.environment = components.environment(home, self.state, recipe, s3=s3)
        self.state.components = []

    async def run(self) -> None:
        """Start everything, stay until `stop`. Raises UserError if it cannot be started."""
        state, loop = self.state, asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        state.state, state.error = "starting", ""
        state.pid, state.started = os.getpid(), start_time(os.getpid())
        state.recipe, state.model = str(self._recipe.path), self._recipe.config.policy.model
        for name in ("run", "logs"):
            (self._home / name).mkdir(parents=True, exist_ok=True)
        self._tell()
        try:
            await self._or_stop(self._prepare())
            if not self._stop.is_set():
                await self._supervise()
        except UserError as error:
            state.state, state.error = "failed", str(error)
            raise
        finally:
            state.state = state.state if state.state == "failed" else "stopped"
            state.pid = 0
            self._tell()

    async def _supervise(self) -> None:
        found = components.processes(self._home, self.state, self._recipe)
        self.state.components = [
            Component(process.name, url=process.url, log=str(self._home / "logs" / f"{process.name}.log")) for process in found
        ]
        self._tell()
        ready = {process.name: asyncio.Event() for process in found}
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tasks = [
            asyncio.create_task(self._keep(process, component, ready, failed))
            for process, component in zip(found, self.state.components, strict=True)
        ]
        stop = asyncio.create_task(self._stop.wait())
        everything = asyncio.create_task(_all(ready.values()))
        try:
            waited: list[asyncio.Future[Any]] = [everything, stop, failed]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if everything.done() and not stop.done():
                self._check_storage()
                self.state.state = "ready"
                self._tell()
                await asyncio.wait(waited[1:], return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
        finally:
            everything.cancel()
            stop.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await end_sandboxes(self._home)

    async def _keep(self, process: Process, component: Component, ready: dict[str, asyncio.Event], failed: "asyncio.Future[None]") -> None:
        """Start a process, see that it is healthy, start it again when it ends."""
        try:
            for name in process.after:
                await ready[name].wait()
            while True:
                component.state = "restarting" if component.restarts else "starting"
                child = await self._start(process, component)
                began = time.monotonic()
                try:
                    healthy = await self._until_healthy(process, child)
                    if healthy:
                        component.state, component.note = "ready", ""
                        self._tell()
                        ready[process.name].set()
                        await child.wait()
                finally:
                    await asyncio.to_thread(stop_group, component.pid, component.started)
                    component.state = "stopped"
                    self._tell()
                if time.monotonic() - began > 60:
                    component.restarts = 0
                component.restarts += 1
                component.note = f"ended with {child.returncode}" if healthy else "was not healthy in time"
                if component.restarts > RESTARTS:
                    component.state = "failed"
                    raise UserError(f"{process.name} does not stay up: {component.note}; its log is {component.log}\n{tail(component.log)}")
                self._tell()
                await asyncio.sleep(min(8.0, 0.25 * 2**component.restarts))
        except UserError as error:
            if not failed.done():
                failed.set_exception(error)

    async def _start(self, process: Process, component: Component) -> asyncio.subprocess.Process:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("OPENFORGE_", "AWS_"))} | process.env
        with Path(component.log).open("ab") as log:
            try:
                child = await asyncio.create_subprocess_exec(
                    *process.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
            except OSError as error:
                raise UserError(f"{process.name} cannot be started: {error}; 'openforge doctor' says what is missing") from error
        component.pid, component.started = child.pid, start_time(child.pid)
        self._tell()
        return child

    async def _until_healthy(self, process: Process, child: asyncio.subprocess.Process) -> bool:
        deadline = time.monotonic() + HEALTH_PATIENCE
        while time.monotonic() < deadline and child.returncode is None:
            with contextlib.suppress(Exception):  # not up yet, whatever the library calls it
                if await process.probe():
                    return True
            await asyncio.sleep(0.2)
        return False

    async def _prepare(self) -> None:
        """Run the recipe's preparation once."""
        prepare = self._recipe.stack.prepare
        if prepare is None or Path(prepare.creates).exists():
            return
        log = self._home / "logs" / "prepare.log"
        component = Component("prepare", state="starting", log=str(log))
        self.state.components = [component]
        self._tell()
        with log.open("wb") as opened:
            child = await asyncio.create_subprocess_exec(
                *prepare.command, stdin=asyncio.subprocess.DEVNULL, stdout=opened, stderr=opened, preexec_fn=_die_with_parent
            )
        await child.wait()
        if child.returncode != 0 or not Path(prepare.creates).exists():
            raise UserError(f"the recipe's preparation ended with {child.returncode}; its log is {log}\n{tail(log)}")

    async def _or_stop(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not task.done():
            task.cancel()
        else:
            task.result()

    def _check_storage(self) -> None:
        env = self.state.environment
        os.environ.update({key: value for key, value in env.items() if key.startswith("AWS_")})
        settings = Settings(
            home=self._home, storage_url=env.get("OPENFORGE_STORAGE_URL", ""), s3_endpoint=env.get("OPENFORGE_S3_ENDPOINT", "")
        )
        try:
            Storage.of(settings).check_writable()
        except StorageError as error:
            raise UserError(str(error)) from error

    def _tell(self) -> None:
        write_state(self._home, self.state)
        self._changed(self.state)


async def _all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


def clear_leftovers(state: StackState) -> None:
    """End children of a supervisor that was killed."""
    for component in state.components:
        if component.pid:
            stop_group(component.pid, component.started, patience=5.0)


async def end_sandboxes(home: Path) -> int:
    """Destroy every local sandbox of this stack; returns how many there were. A rollout that is not finished gets another attempt."""
    backend = open_backend("bubblewrap", Settings(home=home))
    sandboxes = await backend.list_sandboxes()
    for sandbox in sandboxes:
        await backend.destroy(sandbox.id)
    return len(sandboxes)


def check_startable(recipe: Recipe, home: Path) -> None:
    """Raise UserError for what would keep the stack from starting, before anything is started."""
    for name in ("trainer", "inference"):
        python = interpreter(name)
        if not python.exists():
            raise UserError(f"the {name} environment is not installed ({python} does not exist); run 'make install'")
    try:
        home.mkdir(parents=True, exist_ok=True)
        probe = home / ".write-check"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{home} cannot be written: {error}") from error
    components.socket_path(home)
    free = shutil.disk_usage(home).free
    if free < 2**30:
        raise UserError(f"{home} has only {free / 2**20:.0f} MiB of free disk; a run needs at least 1 GiB")


def tail(path: str | Path, lines: int = 15) -> str:
    """The end of a log, indented."""
    try:
        text = Path(path).read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return ""
    return "\n".join(f"    {line}" for line in text)


def start_in_background(home: Path, recipe_argv: list[str]) -> subprocess.Popen[bytes]:
    """Start `openforge up …` as a session of its own, its output in HOME/logs/stack.log."""
    (home / "logs").mkdir(parents=True, exist_ok=True)
    with (home / "logs" / "stack.log").open("ab") as log:
        return subprocess.Popen(
            [str(interpreter("base")), "-m", "cli.main", "up", *recipe_argv, "--home", str(home)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def stop_stack(home: Path, patience: float = 60.0) -> bool:
    """Stop the stack in `home`, or what is left of it; returns whether there was anything to stop."""
    state = read_state(home)
    found = state.running or any(component.pid and group_lives(component.pid) for component in state.components)
    if state.running:
        os.kill(state.pid, signal.SIGTERM)
        deadline = time.monotonic() + patience
        while start_time(state.pid) == state.started and time.monotonic() < deadline:
            time.sleep(0.1)
        stop_group(state.pid, state.started)
    state = read_state(home)
    clear_leftovers(state)
    ended = asyncio.run(end_sandboxes(home))
    state.state, state.pid = "stopped", 0
    for component in state.components:
        component.state, component.pid = "stopped", 0
    if home.exists():
        write_state(home, state)
    return found or ended > 0


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
