"""The report of a run, from storage alone: manifests of batches and of versions."""

import json
import statistics
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from activities.trajectories import read
from activities.trajectories.seal import summarise
from cli.problems import UserError
from cli.statistics import Interval, bootstrap_mean, mean_interval
from contracts.batches import BatchSummary, Manifest
from contracts.identity import manifest_path, version_prefix
from contracts.updates import VersionManifest
from infra.storage import Storage


@dataclass(frozen=True)
class Iteration:
    """A sealed training batch and the update that it fed, if that is finished."""

    number: int
    kind: str
    batch: BatchSummary
    update: dict[str, Any] | None


@dataclass(frozen=True)
class Cell:
    """One split in one mode at one version: rewards by task, in the order of the batch."""

    version: int
    split: str
    mode: str
    mean: float
    interval: Interval
    rollouts: int
    rewards: dict[str, list[float]]


@dataclass(frozen=True)
class Comparison:
    """First against last on the same tasks. `interval` is of the mean difference, paired by task."""

    split: str
    mode: str
    before: Cell
    after: Cell
    difference: float
    interval: Interval
    tasks: int


@dataclass(frozen=True)
class Report:
    """Everything the report says."""

    run: str
    harness: str
    iterations: list[Iteration]
    cells: list[Cell]
    comparisons: list[Comparison]
    outcomes: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Rewards by task are left out: they are in the manifests."""
        values = asdict(self)
        values["iterations"] = [
            {**entry, "batch": iteration.batch.model_dump()} for entry, iteration in zip(values["iterations"], self.iterations, strict=True)
        ]
        for cell in (*values["cells"], *(side for entry in values["comparisons"] for side in (entry["before"], entry["after"]))):
            cell.pop("rewards", None)
        return values


@dataclass(frozen=True)
class Written:
    """A report on disk."""

    report: Report
    directory: Path

    def text(self) -> str:
        """The summary for a terminal."""
        report = self.report
        lines = [f"run {report.run}: {len(report.iterations)} iterations with {report.harness}"]
        lines.append("outcomes: " + ", ".join(f"{count} {outcome}" for outcome, count in report.outcomes.items()))
        if report.comparisons:
            first = report.comparisons[0]
            versions = f"version {first.before.version} against {first.after.version}"
            lines.append(f"mean reward and 95 % interval, {versions}, on the same tasks:")
            lines.append(f"  {'':22}{'before':21}{'after':21}{'difference':25}rollouts")
        for entry in report.comparisons:
            rollouts = f"{entry.before.rollouts} + {entry.after.rollouts}"
            name = f"{entry.split}, {entry.mode}"
            cells = f"{_cell(entry.before.mean, entry.before.interval):21}{_cell(entry.after.mean, entry.after.interval):21}"
            lines.append(f"  {name:21} {cells}{_cell(entry.difference, entry.interval, '+'):25}{rollouts}")
        return "\n".join(lines)


def _cell(mean: float, interval: Interval, sign: str = "") -> str:
    low, high = interval
    return f"{mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def collect(storage: Storage, run: str) -> Report:
    """Read a run from storage. Raises UserError if there is nothing of it."""
    names = read.batches(storage, run)
    if not names:
        known = ", ".join(known_runs(storage)) or "none"
        raise UserError(f"run {run!r} has no sealed batch in {storage.root}; runs there: {known}")
    manifests = [read.read_manifest(storage, run, name) for name in names]
    iterations, cells = [], []
    outcomes: Counter[str] = Counter()
    for manifest in manifests:
        for result in manifest.results:
            reason = result.ending.cause or result.ending.limit
            outcomes[result.ending.outcome.value + (f" ({reason})" if reason else "")] += 1
        if manifest.batch.startswith("iteration="):
            iterations.append(_iteration(storage, manifest))
        else:
            cells.append(_evaluation(manifest))
    return Report(run, _harness(storage, run), iterations, cells, _compare(cells), dict(outcomes.most_common()))


def _iteration(storage: Storage, manifest: Manifest) -> Iteration:
    number = int(manifest.batch.removeprefix("iteration="))
    try:
        raw = storage.read(f"{version_prefix(manifest.run, number + 1)}/manifest.json")
        result = VersionManifest.model_validate_json(raw).result
    except FileNotFoundError:
        result = None
    batch = summarise(manifest, manifest_path(manifest.run, manifest.batch))
    config = _config(storage, manifest.run)
    kind = "warm start" if number == 0 and config.get("warm_start") else "rl"
    return Iteration(number, kind, batch, result.model_dump() if result else None)


def _evaluation(manifest: Manifest) -> Cell:
    version, split, mode = manifest.batch.removeprefix("evaluation=").split("-")
    rewards: dict[str, list[float]] = defaultdict(list)
    for result in manifest.results:
        if result.reward is not None:
            rewards[result.task].append(result.reward)
    flat = [reward for values in rewards.values() for reward in values]
    mean = statistics.fmean(flat) if flat else float("nan")
    return Cell(int(version), split, mode, mean, mean_interval(flat), len(flat), dict(rewards))


def _compare(cells: list[Cell]) -> list[Comparison]:
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in sorted(cells, key=lambda cell: cell.version):
        groups[cell.split, cell.mode].append(cell)
    comparisons = []
    for (split, mode), group in groups.items():
        before, after = group[0], group[-1]
        shared = sorted(set(before.rewards) & set(after.rewards))
        if before.version == after.version or not shared:
            continue
        differences = [statistics.fmean(after.rewards[task]) - statistics.fmean(before.rewards[task]) for task in shared]
        comparisons.append(Comparison(split, mode, before, after, statistics.fmean(differences), bootstrap_mean(differences), len(shared)))
    return comparisons


def _config(storage: Storage, run: str) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(storage.read(f"runs/{run}/run.json"))["config"]
    except FileNotFoundError:
        return {}
    return config


def _harness(storage: Storage, run: str) -> str:
    return str(_config(storage, run).get("harness", {}).get("name", "an unknown harness"))


def known_runs(storage: Storage) -> list[str]:
    """Names of the runs in storage."""
    return sorted({path.split("/")[1] for path in storage.list("runs") if path.count("/") > 1})


def latest_version(storage: Storage, run: str) -> int:
    """The newest version whose manifest is there; 0 if none was made."""
    prefix = f"runs/{run}/versions/"
    found = [path for path in storage.list(prefix.rstrip("/")) if path.endswith("/manifest.json")]
    return max((int(path.removeprefix(prefix).split("/")[0].removeprefix("version=")) for path in found), default=0)


def write(storage: Storage, run: str, directory: Path) -> Written:
    """Write `rewards.png`, `report.html` and `report.json` into the directory. Raises UserError."""
    from cli import figures

    report = collect(storage, run)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        picture = figures.rewards(report)
        (directory / "rewards.png").write_bytes(picture)
        (directory / "report.html").write_text(figures.page(report, picture))
        (directory / "report.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"the report cannot be written: {error}") from error
    return Written(report, directory)
