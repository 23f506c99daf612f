"""The run as a Markdown page, for the Temporal UI: what a person wants to know without another tool.

The UI draws tables without space between the columns, so the cells bring their own. A run's static summary does not survive
continue-as-new, so the page says what the run is as well.
"""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from contracts.runs import Progress

SHOWN = 40  # iterations; older ones are in the report
SPACE = "\N{NO-BREAK SPACE}"


def page(progress: Progress, description: str) -> str:
    """Phase, what is in flight, iterations with reward and outcomes, evaluations."""
    flight = progress.in_flight
    lines = [f"{description}\n"] if description else []
    lines += [f"**{progress.phase}** · iteration {progress.iteration} of {progress.iterations} · policy version {progress.version}", ""]
    if flight.of:
        mean = f", mean reward {flight.reward_sum / flight.rewarded:.3f}" if flight.rewarded else ""
        ended = flight.completed + flight.truncated + flight.failed
        lines += [f"{flight.batch}: {ended} of {flight.of} ended, {flight.running} running, {flight.failed} failed{mean}", ""]
    if progress.iterations_done:
        lines += [
            _row("iteration", "kind", "reward", "completed", "truncated", "failed", "version", "seconds"),
            "|--:|---|--:|--:|--:|---|--:|--:|",
        ]
    for done in progress.iterations_done[-SHOWN:]:
        batch = done.batch
        failed = ", ".join(f"{count} {cause}" for cause, count in batch.failed.items()) or "0"
        reward, seconds = _reward(batch.reward_mean, batch.reward_se), f"{done.seconds.get('all', 0):.0f}"
        lines.append(_row(done.iteration, done.kind, reward, batch.completed, batch.truncated, failed, done.update.version, seconds))
    if progress.evaluations:
        lines += ["", _row("version", "split", "mode", "reward", "rollouts"), "|--:|---|---|--:|--:|"]
    for cell in progress.evaluations:
        batch = cell.batch
        lines.append(_row(batch.version, cell.split, cell.mode, _reward(batch.reward_mean, batch.reward_se), batch.started))
    return "\n".join(lines)


def _row(*cells: object) -> str:
    return "|" + "|".join(f"{SPACE}{cell}{SPACE}".replace(" ", SPACE) for cell in cells) + "|"


def _reward(mean: float | None, error: float | None) -> str:
    if mean is None:
        return "–"
    return f"{mean:.3f}" + (f" ± {error:.3f}" if error is not None else "")
