"""Reading Harbor task directories: what is taken, what is refused and how it is said."""

from collections.abc import Callable
from pathlib import Path

import pytest

from activities.tasks import TaskError, list_tasks, load_task
from activities.tasks.environment import environment_files

TOML = '[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 30\n[environment]\nmemory = "2G"\ncpus = 1\n'
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def write(files: dict[str, str | None] | None = None, **more: str) -> Path:
        content: dict[str, str | None] = {
            "task.toml": TOML,
            "instruction.md": "<!-- harbor-canary GUID 1 -->\n\nDo it.\n",
            "environment/Dockerfile": 'FROM debian:bookworm-slim\nWORKDIR /app\nENV A=1 B="two words"\nCOPY data.txt .\n',
            "environment/data.txt": "x",
            "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
            **(files or {}),
        }
        for name, text in content.items():
            if text is not None:
                (tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "task" / name).write_text(text)
        return tmp_path / "task"

    return write


def test_a_task_is_read_whole(make: Make) -> None:
    task = load_task(make())
    assert task.instruction == "Do it."
    assert (task.agent_timeout, task.verifier_timeout, task.memory_mb, task.cpus) == (60, 30, 2048, 1)
    assert (task.image.base, task.image.workdir, task.image.env) == ("debian:bookworm-slim", "/app", {"A": "1", "B": "two words"})
    assert list(environment_files(task)) == ["/app/data.txt"]
    assert task.solution is None
    assert task.warnings == ()


def test_an_unknown_key_is_a_warning(make: Make) -> None:
    assert "unknown key 'agent.colour' is ignored" in load_task(make({"task.toml": '[agent]\ncolour = "red"\n'})).warnings[0]


def test_the_digest_changes_with_any_file(make: Make) -> None:
    before = load_task(make()).digest()
    assert load_task(make({"environment/data.txt": "y"})).digest() != before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"task.toml": "= 1"}, "task.toml: not valid TOML"),
        ({"task.toml": None}, "there is no task.toml"),
        ({"instruction.md": None}, "instruction.md: missing"),
        ({"tests/test.sh": None}, "tests/test.sh: missing"),
        ({"task.toml": "[agent]\ntimeout_sec = 0\n"}, "agent.timeout_sec is 0; it must be a number above 0"),
        ({"task.toml": "[agent]\ntimeout_sec = true\n"}, "agent.timeout_sec is True"),
        ({"task.toml": "agent = 1\n"}, r"\[agent\] must be a table"),
        ({"task.toml": "[environment]\ngpus = 1\n"}, "GPU tasks are not supported"),
        ({"task.toml": '[environment]\nmemory = "2G"\nmemory_mb = 1\n'}, "say the same thing twice"),
        ({"task.toml": '[environment]\nmemory = "much"\n'}, "expected a size such as '4G'"),
        ({"task.toml": '[[steps]]\nname = "a"\n'}, "several steps are not supported"),
        ({"task.toml": '[verifier.env]\nKEY = "${OPENAI_API_KEY}"\n'}, "would put its secrets into a sandbox"),
        ({"environment/docker-compose.yaml": "services: {}"}, "several containers are not supported"),
        ({"environment/Dockerfile": None}, "neither environment/Dockerfile nor environment.docker_image"),
        ({"environment/Dockerfile": "FROM alpine:3\n"}, "line 1: 'FROM alpine:3': .*allowed bases: debian, ubuntu, python"),
        ({"environment/Dockerfile": "FROM debian\nRUN apt-get install x\n"}, "line 2: 'RUN apt-get install x': .*needs an image builder"),
        ({"environment/Dockerfile": "FROM debian\n\n# c\nUSER x\n"}, "line 4: 'USER x': a local sandbox has one user"),
        ({"environment/Dockerfile": "FROM debian\nCOPY nothing .\n"}, "'nothing' does not exist beside the Dockerfile"),
        ({"environment/Dockerfile": "FROM debian\nCOPY ../task.toml .\n"}, "lies outside the environment directory"),
        ({"environment/Dockerfile": "FROM debian\nCOPY --from=x a b\n"}, "another image needs an image builder"),
        ({"environment/Dockerfile": "FROM debian\nFROM debian\n"}, "only one stage"),
        ({"environment/Dockerfile": "WORKDIR /x\n"}, "FROM must come first"),
    ],
)
def test_what_cannot_be_used_is_refused_with_file_and_reason(make: Make, files: dict[str, str | None], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_task(make(files))


def test_a_link_that_leaves_the_task_is_refused(make: Make) -> None:
    task = make()
    (task / "tests" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="a link that leaves the task directory"):
        load_task(task)


def test_continued_lines_and_copies_of_directories(make: Make) -> None:
    dockerfile = "FROM python:3.11\nWORKDIR /srv\nWORKDIR app\nCOPY \\\n  src /opt/src\nCOPY data.txt /opt/renamed.txt\nLABEL a=b\n"
    task = load_task(make({"environment/Dockerfile": dockerfile, "environment/src/deep/f": "1"}))
    assert task.image.workdir == "/srv/app"
    assert sorted(environment_files(task)) == ["/opt/renamed.txt", "/opt/src/deep"]


def test_a_directory_without_tasks_says_so(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"none of its sub-directories holds a task\.toml"):
        list_tasks(tmp_path)
    with pytest.raises(TaskError, match="no such directory of tasks"):
        list_tasks(tmp_path / "nowhere")
