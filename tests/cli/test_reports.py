"""Reports from manifests made by hand: known numbers, and files that need nothing else."""

import json
import math
from pathlib import Path

import pytest

from cli import reports
from cli.problems import UserError
from cli.statistics import bootstrap_mean, mean_interval, wilson
from contracts.batches import Ledger, Manifest
from contracts.failures import Limit, Outcome
from contracts.identity import RolloutId, evaluation_batch, iteration_batch, manifest_path
from contracts.rollouts import Ending, RolloutResult
from infra.storage import Storage


def seal(storage: Storage, batch: str, rewards: list[float | None], version: int = 0) -> None:
    results = [
        RolloutResult(
            rollout=RolloutId(run="run", batch=batch, group=number, member=0), task=f"task-{number}", attempts=1, reward=reward,
            ending=Ending(outcome=Outcome.COMPLETED) if reward is not None else Ending(outcome=Outcome.TRUNCATED, limit=Limit.TOKENS),
            phases={"harness": 1.0, "score": 0.5},
        )
        for number, reward in enumerate(rewards)
    ]  # fmt: skip
    manifest = Manifest(run="run", batch=batch, version=version, ledger=Ledger.of(results, len(results)), results=results)
    storage.write(manifest_path("run", batch), manifest.model_dump_json().encode())


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    made = Storage(f"file://{tmp_path}/storage")
    seal(made, iteration_batch(0), [0.0, 1.0, None])
    seal(made, iteration_batch(1), [1.0, 1.0, 1.0], version=1)
    seal(made, evaluation_batch(0, "held_out", "sampled"), [0.0, 0.0, 1.0, 0.0])
    seal(made, evaluation_batch(2, "held_out", "sampled"), [1.0, 0.0, 1.0, 1.0], version=2)
    return made


def test_wilsons_interval_has_its_published_values() -> None:
    low, high = wilson(8, 10)
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)
    assert wilson(0, 0) == (0.0, 1.0)


def test_the_bootstrap_is_repeatable_and_holds_the_mean() -> None:
    values = [0.1, 0.5, 0.9, 0.3]
    assert bootstrap_mean(values) == bootstrap_mean(values)
    low, high = bootstrap_mean(values)
    assert low < sum(values) / 4 < high
    assert all(math.isnan(bound) for bound in bootstrap_mean([]))
    assert mean_interval([0.0, 1.0]) == wilson(1, 2)


def test_the_numbers_are_those_of_the_manifests(storage: Storage) -> None:
    report = reports.collect(storage, "run")
    assert [(entry.number, entry.batch.reward_mean) for entry in report.iterations] == [(0, 0.5), (1, 1.0)]
    assert report.outcomes == {"completed": 13, "truncated (tokens)": 1}
    (comparison,) = report.comparisons
    assert (comparison.before.mean, comparison.after.mean, comparison.difference, comparison.tasks) == (0.25, 0.75, 0.5, 4)
    assert comparison.interval[0] <= 0.5 <= comparison.interval[1]
    assert comparison.before.interval == wilson(1, 4)


def test_the_files_need_nothing_else(storage: Storage, tmp_path: Path) -> None:
    written = reports.write(storage, "run", tmp_path / "report")
    html = (tmp_path / "report/report.html").read_text()
    assert "src='data:image/png;base64," in html
    assert "http" not in html.replace("http-equiv", "")
    assert (tmp_path / "report/rewards.png").stat().st_size > 5000
    assert json.loads((tmp_path / "report/report.json").read_text())["comparisons"][0]["difference"] == 0.5
    assert "0.250 [0.046, 0.699] 0.750 [0.301, 0.954]" in written.text()


def test_a_run_that_is_not_there_names_those_that_are(storage: Storage) -> None:
    with pytest.raises(UserError, match=r"run 'other' has no sealed batch .*runs there: run"):
        reports.collect(storage, "other")


def test_a_report_that_cannot_be_written_says_so(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the report cannot be written"):
        reports.write(storage, "run", tmp_path / "file" / "deeper")
