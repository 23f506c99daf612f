"""The whole job on real parts: Temporal, vLLM, proxy, bubblewrap, Codex, veRL, storage; and what happens when they are killed.

One local stack for all tests here, brought up and driven by the command line as a person would.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from contracts.config import RunConfig
from contracts.failures import Outcome
from tests.support.processes import BASE_PYTHON
from tests.support.stack import RECIPE, Stack, until

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.trainer]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("home"))
    made.run("up", str(RECIPE), "--detach")
    yield made
    made.run("down")


@pytest.fixture(scope="module")
def trained(stack: Stack) -> str:
    """A run that has gone through, and what `train` printed."""
    return stack.run("train", str(RECIPE), "--name", "first")


def test_a_run_goes_through_and_reports(stack: Stack, trained: str) -> None:
    assert "iteration 2 (rl)" in trained
    assert "on the same tasks:" in trained
    report = json.loads((stack.home / "reports/first/report.json").read_text())
    assert [entry["kind"] for entry in report["iterations"]] == ["warm start", "rl", "rl"]
    assert {(cell["version"], cell["mode"]) for cell in report["cells"]} == {(1, "sampled"), (1, "greedy"), (3, "sampled"), (3, "greedy")}
    assert (stack.home / "reports/first/rewards.png").read_bytes().startswith(b"\x89PNG")
    assert "<img alt" in (stack.home / "reports/first/report.html").read_text()


def test_every_rollout_is_in_the_ledger_and_called_the_model(stack: Stack, trained: str) -> None:
    for batch, started in (("iteration=000000", 16), ("iteration=000001", 9), ("iteration=000002", 9)):
        manifest = stack.manifest("first", batch)
        assert manifest.ledger.started == len(manifest.results) == started
        assert {result.ending.outcome for result in manifest.results} <= {Outcome.COMPLETED, Outcome.TRUNCATED}
        assert all(result.trajectory and result.trajectory.calls >= 1 for result in manifest.results)


def test_demonstrations_are_two_turns_in_one_segment(stack: Stack, trained: str) -> None:
    rows = stack.rows("first", "iteration=000000")
    assert {(row["segment"], row["calls"], row["kind"], row["policy"]) for row in rows} == {(0, 2, "turn", "teacher")}
    assert {row["reward"] for row in rows} <= {0.0, 1.0}


def test_recomputed_log_probabilities_agree_with_those_recorded(stack: Stack, trained: str) -> None:
    for version in (2, 3):
        manifest = json.loads((stack.home / f"storage/runs/first/versions/version={version:06d}/manifest.json").read_text())
        assert manifest["result"]["metrics"]["logprob_diff_max"] < 1e-3
        assert manifest["result"]["rows"] > 0


def test_each_token_carries_the_version_that_sampled_it(stack: Stack, trained: str) -> None:
    for iteration in (1, 2):
        for row in stack.rows("first", f"iteration={iteration:06d}"):
            covered = {place for span in row["versions"] for place in range(span["start"], span["end"])}
            assert {span["version"] for span in row["versions"]} == {iteration}
            assert covered == {place for place, sampled in enumerate(row["response_mask"]) if sampled}


def test_a_row_is_whole(stack: Stack, trained: str) -> None:
    for row in stack.rows("first", "iteration=000001"):
        assert len(row["response_ids"]) == len(row["response_mask"]) == len(row["logprobs"])
        assert all(logprob <= 0 for logprob in row["logprobs"])
        assert json.loads(row["messages"])[-1]["role"] == "assistant"


def test_no_secret_is_in_a_history_a_log_or_a_file(stack: Stack, trained: str) -> None:
    state = stack.state
    secrets = [secret.encode() for secret in state["secrets"].values()] + [b"of-"]
    sessions = {row["session"] for row in stack.rows("first", "iteration=000001")}
    files = [path for path in stack.home.rglob("*") if path.is_file() and path.name != "stack.json" and "quickstart" not in path.parts]
    assert sessions
    for path in files:
        content = path.read_bytes()
        for secret in secrets[:-1]:
            assert secret not in content, f"a secret is in {path}"
        for session in sessions:
            assert b"of-" + session.encode() not in content, f"a session's key is in {path}"


def test_what_was_recorded_can_be_looked_at_and_exported(stack: Stack, trained: str) -> None:
    shown = stack.run("trajectories", "show", "first", "--batch", "iteration=000000", "--group", "1")
    assert "exec_command" in shown
    assert "Process exited with code" in shown
    stack.run("trajectories", "export", "first", str(stack.home / "all.parquet"))
    assert pq.read_table(stack.home / "all.parquet").num_rows == 16 + 9 + 9 + 4 * 4


def test_a_run_can_be_started_by_the_temporal_cli_with_plain_json(stack: Stack, trained: str) -> None:
    config = json.loads((stack.home / "storage/runs/first/run.json").read_text())["config"]
    config |= {"name": "plain", "training": {"iterations": 1}, "warm_start": None, "evaluation": {"splits": {}}}
    config["rollout"] |= {"groups": 1, "group_size": 2}
    config = RunConfig.model_validate(config).model_dump(mode="json", exclude_defaults=True)
    command = [
        BASE_PYTHON.parent / "temporal", "workflow", "execute", "--address", stack.state["environment"]["OPENFORGE_TEMPORAL_ADDRESS"],
        "--type", "TrainingRun", "--task-queue", "openforge", "-w", "plain", "--input", json.dumps({"config": config}), "-o", "json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["result"]["version"] == 1


def test_a_run_survives_the_death_of_its_worker_its_proxy_and_its_trainer(stack: Stack, trained: str) -> None:
    stack.run("train", str(RECIPE), "--name", "crashed", "--detach", "--set", "training.iterations=3", "--set", "evaluation.splits={}")

    def in_the_middle_of(iteration: int) -> bool:
        progress = stack.progress("crashed")
        flight = progress.get("in_flight", {})
        return progress.get("iteration", -1) >= iteration and flight.get("running", 0) > 1 and flight.get("started", 0) > 3

    until(lambda: in_the_middle_of(1), 120, "the middle of iteration 1")
    os.kill(stack.pid("worker"), signal.SIGKILL)
    until(lambda: in_the_middle_of(2), 120, "the middle of iteration 2")
    os.kill(stack.pid("proxy"), signal.SIGKILL)
    before = stack.finished_calls()
    os.kill(stack.pid("trainer"), signal.SIGKILL)
    until(lambda: stack.progress("crashed").get("phase") == "finished", 180, "the end of the run")

    assert before <= stack.finished_calls()
    tasks = []
    for iteration in range(1, 4):
        manifest = stack.manifest("crashed", f"iteration={iteration:06d}")
        assert manifest.ledger.started == len(manifest.results) == 9
        assert {result.ending.outcome for result in manifest.results} <= {Outcome.COMPLETED, Outcome.TRUNCATED}
        tasks += sorted({result.task for result in manifest.results})
    assert len(tasks) == len(set(tasks)) == 9, "a prompt was trained twice, or not at all"
    versions = sorted(path.name for path in (stack.home / "storage/runs/crashed/versions").iterdir())
    assert versions == [f"version={number:06d}" for number in range(1, 5)]


def test_nothing_is_left_of_the_sandboxes(stack: Stack, trained: str) -> None:
    until(lambda: stack.sandboxes() == [], 30, "the last clean-up")
    left = subprocess.run(["pgrep", "-f", f"supervisor.py {stack.home}"], capture_output=True, text=True).stdout
    assert left == ""


def test_a_name_that_was_used_is_refused(stack: Stack, trained: str) -> None:
    assert "has ended already" in stack.run("train", str(RECIPE), "--name", "first", code=2)


def test_a_recipe_with_another_model_is_refused_by_a_running_stack(stack: Stack, tmp_path: Path) -> None:
    said = stack.run("train", str(RECIPE), "--set", f"policy.model={tmp_path}", code=2)
    assert "stop it with 'openforge down' first" in said


def test_a_task_directory_that_is_not_there_fails_the_run_by_name(stack: Stack) -> None:
    said = stack.run("train", str(RECIPE), "--name", "lost", "--set", "tasks=/nowhere", code=2)
    assert "tasks: /nowhere: no such directory of tasks" in said


def test_the_end_leaves_no_process(stack: Stack) -> None:
    pids = [component["pid"] for component in stack.state["components"]]
    stack.run("down")
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]]
    assert alive == []
    assert stack.state["state"] == "stopped"
