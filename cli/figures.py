"""The report's picture and its page."""

import base64
import html
import io

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cli.reports import Cell, Report

INK, TRAIN, COLOURS = "#24292f", "#8c959f", ("#0969da", "#1a7f37", "#bf3989", "#9a6700")
STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #656d76 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .25rem .7rem; border-bottom: 1px solid var(--line) }
th { text-align: right; font-weight: 600 } td { text-align: right } td:first-child, th:first-child { text-align: left }
img { max-width: 100%; background: white; border-radius: 6px } p { color: var(--soft) } div.wide { overflow-x: auto }
"""


def rewards(report: Report) -> bytes:
    """PNG: mean reward of each training batch with its standard error, and the evaluations with their intervals."""
    mpl.rcParams["font.family"] = "DejaVu Sans"
    figure = Figure(figsize=(8, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    training = [entry for entry in report.iterations if entry.kind == "rl" and entry.batch.reward_mean is not None]
    if training:
        x = [entry.number for entry in training]
        y = [entry.batch.reward_mean or 0.0 for entry in training]
        e = [entry.batch.reward_se or 0.0 for entry in training]
        axes.fill_between(
            x, [a - b for a, b in zip(y, e, strict=True)], [a + b for a, b in zip(y, e, strict=True)], color=TRAIN, alpha=0.25, lw=0
        )
        axes.plot(x, y, color=TRAIN, lw=1.6, label="training batches (mean ± standard error)")
    series: dict[tuple[str, str], list[Cell]] = {}
    for cell in report.cells:
        series.setdefault((cell.split, cell.mode), []).append(cell)
    for place, ((split, mode), cells) in enumerate(sorted(series.items())):
        ordered = sorted(cells, key=lambda cell: cell.version)
        shift = 0.12 * (place - (len(series) - 1) / 2)
        x2 = [cell.version + shift for cell in ordered]
        means = [cell.mean for cell in ordered]
        low = [max(0.0, cell.mean - cell.interval[0]) for cell in ordered]
        high = [max(0.0, cell.interval[1] - cell.mean) for cell in ordered]
        colour = COLOURS[place % len(COLOURS)]
        axes.errorbar(
            x2, means, yerr=[low, high], color=colour, fmt="o", ms=5, lw=1.2, capsize=3, label=f"{split.replace('_', ' ')}, {mode}"
        )
    axes.set_xlabel("policy version")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("reward")
    top = max([1.0, *(cell.interval[1] for cell in report.cells)])
    axes.set_ylim(min(0.0, *(cell.interval[0] for cell in report.cells), 0.0) - 0.03, top + 0.05)
    axes.grid(axis="y", color="#d0d7de", lw=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(f"{report.run}: reward inside {report.harness}", loc="left", color=INK, fontsize=11)
    if training or series:
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def page(report: Report, picture: bytes) -> str:
    """One HTML file that needs nothing else."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{_text(report.run)}</title><style>{STYLE}</style><h1>{_text(report.run)}</h1>",
        f"<p>{len(report.iterations)} iterations inside {_text(report.harness)}. Outcomes of all rollouts: "
        + ", ".join(f"{count} {_text(outcome)}" for outcome, count in report.outcomes.items())
        + ".</p>",
        f"<img alt='Reward by policy version' src='data:image/png;base64,{base64.b64encode(picture).decode()}'>",
    ]
    if report.comparisons:
        rows = [
            [
                f"{entry.split}, {entry.mode}", _interval(entry.before.mean, entry.before.interval),
                _interval(entry.after.mean, entry.after.interval),
                f"{entry.difference:+.3f} [{entry.interval[0]:+.3f}, {entry.interval[1]:+.3f}]",
                f"{entry.before.rollouts} / {entry.after.rollouts}", str(entry.tasks),
            ]
            for entry in report.comparisons
        ]  # fmt: skip
        parts.append("<h2>Before and after, on the same tasks</h2>")
        parts.append(_table(["", "before", "after", "difference, paired by task", "rollouts", "tasks"], rows))
        parts.append("<p>95 % intervals: Wilson for rewards of 0 and 1, bootstrap otherwise and for paired differences.</p>")
    parts.append("<h2>Iterations</h2>")
    parts.append(_table(ITERATION_HEAD, [_iteration_row(report, place) for place in range(len(report.iterations))]))
    return "\n".join(parts) + "</html>\n"


ITERATION_HEAD = [
    "iteration", "kind", "reward", "completed", "truncated", "failed", "attempts", "calls", "tokens sampled", "trained rows",
    "batch s", "update s", "harness s a rollout", "other s a rollout", "log-prob difference",
]  # fmt: skip


def _iteration_row(report: Report, place: int) -> list[str]:
    entry = report.iterations[place]
    batch, update = entry.batch, entry.update
    mean = "–" if batch.reward_mean is None else f"{batch.reward_mean:.3f}" + (f" ± {batch.reward_se:.3f}" if batch.reward_se else "")
    failed = ", ".join(f"{count} {cause}" for cause, count in batch.failed.items()) or "0"
    harness = batch.phases.get("harness", 0.0)
    row = [str(entry.number), entry.kind, mean, str(batch.completed), str(batch.truncated), failed, str(batch.attempts), str(batch.calls)]
    row += [f"{batch.response_tokens:,}", str(update["rows"]) if update else "–", f"{batch.seconds:.0f}"]
    row += [f"{sum(update['seconds'].values()):.1f}" if update else "–", f"{harness:.2f}", f"{sum(batch.phases.values()) - harness:.2f}"]
    difference = update["metrics"].get("logprob_diff_max") if update else None
    return [*row, "–" if difference is None else f"{difference:.1e}"]


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><tr>{cells}</tr>{body}</table></div>"


def _interval(mean: float, interval: tuple[float, float]) -> str:
    return f"{mean:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


def _text(value: str) -> str:
    return html.escape(value)
