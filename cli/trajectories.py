"""`openforge trajectories`: print recorded rollouts, export them as one table."""

import json
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from activities.trajectories import read
from cli import reports
from cli.options import DEFAULT_HOME, Home, Run
from cli.problems import UserError
from cli.state import stack_settings
from contracts.identity import RolloutId
from infra.storage import Storage

app = typer.Typer(no_args_is_help=True)
console = Console()

Batch = Annotated[str | None, typer.Option(help="Batch, such as iteration=000003; none: the last one.")]


@app.command()
def show(
    run: Run,
    batch: Batch = None,
    group: Annotated[int, typer.Option(min=0)] = 0,
    member: Annotated[int, typer.Option(min=0)] = 0,
    home: Home = DEFAULT_HOME,
) -> None:
    """Print one rollout readably: messages, tool calls, tokens with mask and log-probabilities, reward."""
    storage = Storage.of(stack_settings(home))
    chosen = _batch(storage, run, batch)
    render(storage, RolloutId(run=run, batch=chosen, group=group, member=member).trajectory_path, console)


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Argument(help="File to write: .parquet or .jsonl.")],
    batch: Annotated[str | None, typer.Option(help="Only this batch.")] = None,
    home: Home = DEFAULT_HOME,
) -> None:
    """Write all samples of a run as one table for pandas, DuckDB or `datasets`."""
    if out.suffix not in {".parquet", ".jsonl"}:
        raise UserError(f"{out}: the name must end in .parquet or .jsonl")
    storage = Storage.of(stack_settings(home))
    batches = [_batch(storage, run, batch)] if batch else _batches(storage, run)
    table = pa.concat_tables([read.read_batch(storage, read.read_manifest(storage, run, name)) for name in batches])
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".parquet":
        pq.write_table(table, out, compression="zstd")
    else:
        with out.open("w") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist())
    console.print(f"{table.num_rows} samples of {len(batches)} batches in {out}")


def render(storage: Storage, path: str, target: Console) -> None:
    """Print the rows of one trajectory file. Raises UserError if it is not there."""
    try:
        rows = read.read_trajectory(storage, path).to_pylist()
    except FileNotFoundError as error:
        raise UserError(f"{error}; 'openforge report RUN' shows how many groups and members a batch has") from None
    first = rows[0]
    facts = Table.grid(padding=(0, 2))
    facts.add_row("rollout", f"[bold]{first['rollout']}[/] (attempt {first['attempt']})")
    facts.add_row("task", first["task"])
    facts.add_row("harness", f"{first['harness']} {first['harness_version']}, {first['policy']} by {first['engine']}")
    reason = first["cause"] or first["limit"]
    facts.add_row("outcome", first["outcome"] + (f" ({reason})" if reason else "") + (f": {first['message']}" if first["message"] else ""))
    facts.add_row("reward", "none" if first["reward"] is None else f"{first['reward']:g} {dict(first['reward_parts']) or ''}")
    facts.add_row("seconds", ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in first["phases"]))
    target.print(facts)
    for row in rows:
        if row["kind"] is not None:
            _render_segment(row, target)


def _render_segment(row: dict[str, Any], target: Console) -> None:
    trained = "trained" if row["trainable"] else "not trained"
    target.rule(f"segment {row['segment']} ({row['segment_reason']}, {row['kind']}, {trained}): {row['calls']} calls")
    for message in json.loads(row["messages"]):
        target.print(Panel(_message_text(message), title=message["role"], title_align="left", border_style=_colour(message["role"])))
    tokens = Text()
    for token, sampled, logprob in zip(row["response_ids"], row["response_mask"], row["logprobs"], strict=True):
        style = "green" if sampled and logprob > -0.1 else "yellow" if sampled and logprob > -1 else "red" if sampled else "dim"
        tokens.append(f"{token}" + (f"({logprob:.2f}) " if sampled else " "), style=style)
    versions = ", ".join(f"{span['version']} on [{span['start']}, {span['end']})" for span in row["versions"])
    target.print(f"{len(row['prompt_ids'])} prompt tokens; then, sampled ones with their log-probability (versions {versions}):")
    target.print(tokens)


def _message_text(message: dict[str, Any]) -> Text:
    text = Text(str(message.get("reasoning_content") or ""), style="dim italic")
    text.append(str(message.get("content") or ""), style="not dim not italic")
    for call in message.get("tool_calls") or []:
        text.append(f"→ {call['function']['name']}({call['function']['arguments']})", style="bold cyan")
    return text


def _colour(role: str) -> str:
    return {"system": "dim", "user": "blue", "assistant": "green", "tool": "magenta"}.get(role, "white")


def _batches(storage: Storage, run: str) -> list[str]:
    found = read.batches(storage, run)
    if not found:
        known = ", ".join(reports.known_runs(storage)) or "none"
        raise UserError(f"run {run!r} has no sealed batch in {storage.root}; runs there: {known}")
    return found


def _batch(storage: Storage, run: str, batch: str | None) -> str:
    found = _batches(storage, run)
    if batch is None:
        return found[-1]
    if batch not in found:
        raise UserError(f"run {run} has no batch {batch!r}; it has {', '.join(found)}")
    return batch
