"""The command line as a person meets it: help, exit codes, no traceback for a mistake."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from cli.components import socket_path
from cli.problems import UserError
from cli.progress import sparkline
from cli.recipes import load_recipe
from cli.state import Component, StackState, group_lives, read_state, start_time, stop_group, write_state
from cli.supervisor import check_startable, clear_leftovers
from tests.support.processes import BASE_PYTHON, ROOT

OPENFORGE = BASE_PYTHON.parent / "openforge"


def run(*arguments: str | Path, cwd: Path = ROOT, code: int = 0) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OPENFORGE_")} | {
        "COLUMNS": "200",
        "OPENFORGE_TEMPORAL_ADDRESS": "127.0.0.1:9",
    }
    done = subprocess.run([OPENFORGE, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_help_teaches_and_lists_every_command() -> None:
    text = run("--help")
    for word in (
        "train",
        "status",
        "pause",
        "resume",
        "stop",
        "extend",
        "eval",
        "rollout",
        "report",
        "up",
        "down",
        "doctor",
        "trajectories",
    ):
        assert word in text
    assert "Start with" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.yaml"], "there is no recipe nowhere.yaml"),
        (["train", "recipes/quickstart", "--set", "training.iterations=none"], "training.iterations"),
        (["train", "recipes/quickstart", "--set", "harness.nme=codex"], "harness.nme: unknown key; did you mean 'name'?"),
        (["report", "nothing"], "run 'nothing' has no sealed batch"),
        (["trajectories", "show", "nothing"], "run 'nothing' has no sealed batch"),
        (["trajectories", "export", "nothing", "x.csv"], "must end in .parquet or .jsonl"),
        (["status", "nothing"], "Temporal does not answer"),
        (["rollout", "recipes/quickstart", "--task", "nowhere"], "nowhere: there is no task.toml"),
    ],
)
def test_a_mistake_is_a_sentence_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert message in run(*arguments, "--home", tmp_path, code=2)


def test_tasks_that_are_not_valid_end_with_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "task.toml").write_text("")
    assert "instruction.md: missing" in run("tasks", "validate", tmp_path, code=1)


def test_doctor_finds_this_machine_in_order() -> None:
    text = run("doctor")
    assert "✗" not in text
    assert "bubblewrap with user namespaces" in text


def test_down_without_a_stack_is_no_error(tmp_path: Path) -> None:
    assert "nothing was running" in run("down", "--home", tmp_path)


def test_the_state_file_is_the_owners_alone(tmp_path: Path) -> None:
    state = StackState()
    state.secret("proxy_admin")
    write_state(tmp_path, state)
    assert (tmp_path / "stack.json").stat().st_mode & 0o777 == 0o600
    assert read_state(tmp_path).secrets == state.secrets


def test_a_port_in_use_is_passed_over_and_a_free_one_is_kept() -> None:
    state = StackState()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        state.ports["proxy"] = taken.getsockname()[1]
        assert state.port("proxy") != taken.getsockname()[1]
    chosen = state.ports["proxy"]
    assert state.port("proxy") == chosen


def test_a_process_is_ended_by_its_identity_and_never_by_its_number_alone() -> None:
    child = subprocess.Popen(["bash", "-c", "sleep 300 & wait"], start_new_session=True)
    stop_group(child.pid, "another start time")
    assert group_lives(child.pid)
    clear_leftovers(StackState(components=[Component("child", pid=child.pid, started=start_time(child.pid))]))
    child.wait(10)
    assert not group_lives(child.pid)


def test_a_directory_that_cannot_hold_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too long for a unix socket"):
        socket_path(tmp_path / ("x" * 120))


def test_an_environment_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENFORGE_INFERENCE_PYTHON", str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"the inference environment is not installed .*make install"):
        check_startable(load_recipe(ROOT / "recipes/quickstart", tmp_path), tmp_path)


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        check_startable(load_recipe(ROOT / "recipes/quickstart", tmp_path), tmp_path / "file" / "home")


def test_a_sparkline_spans_zero_to_one() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
