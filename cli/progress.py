"""A run's progress on the terminal: a live panel, or a line for each event where there is no terminal."""

import asyncio
import time
from contextlib import suppress
from urllib.parse import quote

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.service import RPCError

from cli.state import StackState
from contracts.runs import Activity, Progress
from infra.settings import Settings

console = Console()
BARS = "▁▂▃▄▅▆▇█"
_LONG_UPDATE = 100  # steps; a shorter update is over before a line about it helps


def link(state: StackState, settings: Settings, workflow: str) -> str:
    """The workflow's page in the Temporal UI."""
    port = state.ports.get("temporal_ui")
    base = f"http://127.0.0.1:{port}" if port else f"(Temporal UI of {settings.temporal_address})"
    return f"{base}/namespaces/{settings.temporal_namespace}/workflows/{quote(workflow, safe='')}"


async def ask(client: Client, name: str) -> Progress:
    """The progress of a run or an evaluation; that of a run which is measuring itself shows its evaluation's rollouts.

    Raises RPCError if there is none of this name, or no worker to answer.
    """
    found: Progress = await client.get_workflow_handle(name).query("progress", result_type=Progress)
    if found.measuring:
        with suppress(RPCError):  # it has not begun, or has ended
            measured: Progress = await client.get_workflow_handle(found.measuring).query("progress", result_type=Progress)
            return found.model_copy(update={"in_flight": measured.in_flight, "evaluations": found.evaluations + measured.evaluations})
    return found


async def follow(client: Client, name: str, url: str) -> None:
    """Show the run, or the evaluation, until it ends."""
    handle = client.get_workflow_handle(name)
    lines = _Lines()
    with Live(console=console, refresh_per_second=4, auto_refresh=console.is_terminal, transient=False) as live:
        while True:
            try:
                progress = await ask(client, name)
            except RPCError as error:
                if console.is_terminal:
                    live.update(Text(f"waiting for a worker: {error.message}"))
                progress = None
            description = await handle.describe()
            if progress:
                step = await update_step(client, description)
                if console.is_terminal:
                    live.update(panel(progress, name, url, step))
                else:
                    lines.show(progress, step)
            if description.status is not WorkflowExecutionStatus.RUNNING:
                return
            await asyncio.sleep(1.0)


async def update_step(client: Client, description: WorkflowExecutionDescription) -> tuple[str, int, int] | None:
    """(phase, step, steps) of the trainer, as the update's last heartbeat said; none while there is no update."""
    for pending in description.raw_description.pending_activities:
        if pending.activity_type.name == Activity.UPDATE_POLICY and pending.heartbeat_details.payloads:
            phase, step, steps = await client.data_converter.decode(pending.heartbeat_details.payloads, [str, int, int])
            return phase, step, steps
    return None


def panel(progress: Progress, name: str, url: str, step: tuple[str, int, int] | None = None) -> Group:
    """The live view."""
    flight = progress.in_flight
    ended = flight.completed + flight.truncated + flight.failed
    facts = Table.grid(padding=(0, 2))
    facts.add_row("run", f"[bold]{name}[/]  {url}")
    facts.add_row("phase", f"[yellow]{progress.phase}[/]" if progress.paused else progress.phase)
    facts.add_row("iteration", f"{progress.iteration} of {progress.iterations}   policy version {progress.version}")
    failed = f"[red]{flight.failed} failed[/]" if flight.failed else "0 failed"
    facts.add_row("rollouts", f"{ended} of {flight.of} ended, {flight.running} running, {failed}   {flight.batch}")
    if step:
        facts.add_row("trainer", step[0] + (f", step {step[1]} of {step[2]}" if step[2] else ""))
    facts.add_row("reward", reward_line(progress))
    facts.add_row("elapsed", f"{duration(time.time() - progress.started_at)}   {eta(progress)}")
    return Group(facts, ProgressBar(total=max(1, flight.of), completed=ended, width=60))


def reward_line(progress: Progress) -> str:
    """The mean reward of the last iteration and a sparkline over all."""
    means = [done.batch.reward_mean for done in progress.iterations_done if done.batch.reward_mean is not None]
    if not means:
        return "–"
    return f"{means[-1]:.3f}  {sparkline(means[-40:])}"


def sparkline(values: list[float]) -> str:
    """Values from 0 to 1 (or their own range where it is wider) as blocks."""
    low, high = min(0.0, *values), max(1.0, *values)
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / (high - low) * len(BARS)))] for value in values)


def eta(progress: Progress) -> str:
    """Time left, from the mean of the last iterations of the same kind."""
    left = progress.iterations - progress.iteration
    recent = [done.seconds.get("all", 0.0) for done in progress.iterations_done if done.kind == "rl"][-4:]
    if not recent or left <= 0 or progress.paused:
        return ""
    return f"about {duration(left * sum(recent) / len(recent))} left"


class _Lines:
    """Events in plain lines."""

    def __init__(self) -> None:
        self._phase = ""
        self._iterations = 0
        self._cells = 0
        self._tenth = ("", -1)
        self._step = ("", -1)

    def show(self, progress: Progress, step: tuple[str, int, int] | None) -> None:
        phase = f"{progress.phase} (iteration {progress.iteration} of {progress.iterations})"
        if phase != self._phase:
            self._say(phase)
            self._phase = phase
        flight = progress.in_flight
        ended = flight.completed + flight.truncated + flight.failed
        tenth = (flight.batch, 4 * ended // max(1, flight.of))
        if flight.of and tenth != self._tenth:
            self._tenth = tenth
            mean = f", mean reward {flight.reward_sum / flight.rewarded:.3f}" if flight.rewarded else ""
            self._say(f"  {flight.batch}: {ended} of {flight.of} ended, {flight.running} running, {flight.failed} failed{mean}")
        if step and step[2] >= _LONG_UPDATE and (quarter := (step[0], 4 * step[1] // step[2])) != self._step:
            self._step = quarter
            self._say(f"  {step[0]}: step {step[1]} of {step[2]}")
        for done in progress.iterations_done[self._iterations :]:
            mean = "–" if done.batch.reward_mean is None else f"{done.batch.reward_mean:.3f}"
            self._say(
                f"iteration {done.iteration} ({done.kind}): reward {mean}, version {done.update.version}, {done.seconds['all']:.0f} s"
            )
        self._iterations = len(progress.iterations_done)
        for cell in progress.evaluations[self._cells :]:
            mean = "–" if cell.batch.reward_mean is None else f"{cell.batch.reward_mean:.3f}"
            self._say(f"evaluation of version {cell.batch.version}: {cell.split}, {cell.mode}: reward {mean} over {cell.batch.started}")
        self._cells = max(self._cells, len(progress.evaluations))  # fewer for a moment, between an evaluation's end and its report

    def _say(self, text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """For a person."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
