"""Harbor's task directory, read by us: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`.

Keys that this reader does not know are warnings, as Harbor ignores them; what it knows but cannot carry out is an error.
"""

import hashlib
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from activities.tasks.dockerfile import DockerfileError, LocalImage, parse_dockerfile

KNOWN: Final[dict[str, set[str]]] = {
    "": {
        "schema_version",
        "version",
        "task",
        "metadata",
        "artifacts",
        "multi_step_reward_strategy",
        "agent",
        "verifier",
        "environment",
        "solution",
        "steps",
        "source",
    },
    "task": {"name", "version", "description", "authors", "keywords"},
    "agent": {"timeout_sec", "user", "network_mode", "allowed_hosts"},
    "verifier": {"timeout_sec", "env", "user", "network_mode", "allowed_hosts", "environment_mode", "environment", "collect"},
    "environment": {
        "build_timeout_sec",
        "docker_image",
        "cpus",
        "memory_mb",
        "storage_mb",
        "gpus",
        "network_mode",
        "allowed_hosts",
        "env",
        "workdir",
        "healthcheck",
        "mcp_servers",
        "skills_dir",
        "allow_internet",
        "memory",
        "storage",
        "os",
    },
    "solution": {"env"},
}
DEFAULT_WORKDIR: Final = "/app"


class TaskError(ValueError):
    """A task directory that cannot be used: says which file and why."""


@dataclass(frozen=True)
class Task:
    """A task as the sandbox needs it. Times are in seconds; `agent_timeout` none is unlimited."""

    path: Path
    name: str
    instruction: str
    image: LocalImage
    agent_timeout: float | None
    verifier_timeout: float
    verifier_env: dict[str, str]
    solution_env: dict[str, str]
    cpus: float | None = None
    memory_mb: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def tests(self) -> Path:
        return self.path / "tests"

    @property
    def solution(self) -> Path | None:
        """The oracle's directory, where the task has one."""
        return self.path / "solution" if (self.path / "solution" / "solve.sh").is_file() else None

    def digest(self) -> str:
        """sha256 over the names, modes and contents of all files, hex."""
        total = hashlib.sha256()
        for file in sorted(path for path in self.path.rglob("*") if path.is_file()):
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            total.update(f"{file.relative_to(self.path)}\0{file.stat().st_mode & 0o111}\0{content}\n".encode())
        return total.hexdigest()


def list_tasks(directory: Path) -> list[Path]:
    """Task directories directly below `directory`, by name. Raises TaskError if it does not exist or holds none."""
    if not directory.is_dir():
        raise TaskError(f"{directory}: no such directory of tasks")
    found = sorted(file.parent for file in directory.glob("*/task.toml"))
    if not found:
        raise TaskError(f"{directory}: none of its sub-directories holds a task.toml")
    return found


def load_task(path: Path) -> Task:
    """Read and check a task directory. Raises TaskError."""
    path = path.resolve()
    toml = path / "task.toml"
    if not toml.is_file():
        raise TaskError(f"{path}: there is no task.toml")
    try:
        config = tomllib.loads(toml.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{toml}: not valid TOML: {error}") from error
    for needed in ("instruction.md", "tests/test.sh"):
        if not (path / needed).is_file():
            raise TaskError(f"{path / needed}: missing")
    _refuse_links_that_leave(path)

    warnings = [
        f"{toml}: unknown key {f'{table}.{key}' if table else key!r} is ignored"
        for table, known in KNOWN.items()
        for key in _table(config, table, toml)
        if key not in known
    ]
    environment = _table(config, "environment", toml)
    _refuse_what_cannot_run(path, toml, config, environment)
    image = _image(path, toml, environment)
    env = {**image.env, **_env(environment, "environment", toml)}
    workdir = environment.get("workdir", image.workdir if image.workdir != "/" else DEFAULT_WORKDIR)
    agent, verifier = _table(config, "agent", toml), _table(config, "verifier", toml)
    return Task(
        path=path,
        name=str(_table(config, "task", toml).get("name") or path.name),
        instruction=_instruction((path / "instruction.md").read_text()),
        image=LocalImage(base=image.base, workdir=str(workdir), env=env, copies=image.copies),
        agent_timeout=_number(agent, "timeout_sec", toml, "agent"),
        verifier_timeout=_number(verifier, "timeout_sec", toml, "verifier") or 600.0,
        verifier_env=_env(verifier, "verifier", toml),
        solution_env=_env(_table(config, "solution", toml), "solution", toml),
        cpus=_number(environment, "cpus", toml, "environment"),
        memory_mb=_memory_mb(environment, toml),
        metadata=_table(config, "metadata", toml),
        warnings=tuple(warnings),
    )


def _refuse_what_cannot_run(path: Path, toml: Path, config: dict[str, Any], environment: dict[str, Any]) -> None:
    if config.get("steps"):
        raise TaskError(f"{toml}: steps: tasks of several steps are not supported")
    if (path / "environment" / "docker-compose.yaml").exists():
        raise TaskError(f"{path / 'environment' / 'docker-compose.yaml'}: tasks of several containers are not supported")
    if environment.get("gpus"):
        raise TaskError(f"{toml}: environment.gpus: GPU tasks are not supported")
    if environment.get("mcp_servers"):
        raise TaskError(f"{toml}: environment.mcp_servers: not supported")
    if config.get("verifier", {}).get("environment_mode", "shared") != "shared":
        raise TaskError(f"{toml}: verifier.environment_mode: only 'shared' is supported")


def _image(path: Path, toml: Path, environment: dict[str, Any]) -> LocalImage:
    dockerfile = path / "environment" / "Dockerfile"
    if dockerfile.is_file():
        try:
            return parse_dockerfile(dockerfile)
        except DockerfileError as error:
            raise TaskError(str(error)) from error
    if name := environment.get("docker_image"):
        return LocalImage(base=str(name), workdir="/", env={}, copies=())
    raise TaskError(f"{path}: there is neither environment/Dockerfile nor environment.docker_image in {toml.name}")


def _instruction(text: str) -> str:
    """The instruction without the canary comments that public sets put on top."""
    lines = text.splitlines()
    while lines and (not lines[0].strip() or re.match(r"^\s*(<!--.*canary.*-->|#.*canary.*)\s*$", lines[0], re.IGNORECASE)):
        lines.pop(0)
    return "\n".join(lines).strip()


def _table(config: dict[str, Any], name: str, toml: Path) -> dict[str, Any]:
    table = config if not name else config.get(name, {})
    if not isinstance(table, dict):
        raise TaskError(f"{toml}: [{name}] must be a table")
    return table


def _number(table: dict[str, Any], key: str, toml: Path, name: str) -> float | None:
    value = table.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise TaskError(f"{toml}: {name}.{key} is {value!r}; it must be a number above 0")
    return float(value)


def _env(table: dict[str, Any], name: str, toml: Path) -> dict[str, str]:
    env = table.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise TaskError(f"{toml}: {name}.env must be a table of strings")
    for key, value in env.items():
        if "${" in value and ":-" not in value:
            raise TaskError(f"{toml}: {name}.env.{key}: taking variables from the host would put its secrets into a sandbox")
    return {key: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for key, value in env.items()}


def _memory_mb(environment: dict[str, Any], toml: Path) -> int | None:
    if "memory" in environment and "memory_mb" in environment:
        raise TaskError(f"{toml}: environment.memory and environment.memory_mb say the same thing twice")
    if "memory" in environment:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG])i?B?", str(environment["memory"]), re.IGNORECASE)
        if not match:
            raise TaskError(f"{toml}: environment.memory is {environment['memory']!r}; expected a size such as '4G'")
        return max(1, int(float(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[match[2].upper()]))
    value = _number(environment, "memory_mb", toml, "environment")
    return None if value is None else int(value)


def _refuse_links_that_leave(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_symlink() and not file.resolve().is_relative_to(path):
            raise TaskError(f"{file}: a link that leaves the task directory")
