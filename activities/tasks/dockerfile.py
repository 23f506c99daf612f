"""The part of a Dockerfile that a machine without an image builder can carry out.

FROM a plain Debian, Ubuntu or Python image stands for the host's own system; WORKDIR, ENV and COPY of local files are carried out.
Everything else is refused with its line and the reason: a task must not run in an environment that is silently not its own.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

PLAIN_BASES: Final = ("debian", "ubuntu", "python")

REASONS: Final = {
    "RUN": "running commands while building needs an image builder; use the Kubernetes backend with a built image",
    "ADD": "use COPY for local files",
    "USER": "a local sandbox has one user",
    "ENTRYPOINT": "a local sandbox has no entry point",
    "VOLUME": "a local sandbox has no volumes",
    "SHELL": "commands run with bash",
    "ONBUILD": "there is no image to build upon",
}
IGNORED: Final = frozenset({"LABEL", "MAINTAINER", "EXPOSE", "CMD", "STOPSIGNAL"})  # without effect on a sandbox that runs commands


class DockerfileError(ValueError):
    """A line that cannot be carried out."""


@dataclass(frozen=True)
class Copy:
    """COPY: host paths to an absolute sandbox path. `into`: the target is a directory that keeps the sources' names."""

    sources: tuple[Path, ...]
    target: str
    into: bool


@dataclass(frozen=True)
class LocalImage:
    """What a sandbox needs of a Dockerfile."""

    base: str
    workdir: str
    env: dict[str, str]
    copies: tuple[Copy, ...]


def parse_dockerfile(file: Path) -> LocalImage:
    """Read a Dockerfile; its directory is the build context. Raises DockerfileError with file, line and reason."""
    base, workdir = "", "/"
    env: dict[str, str] = {}
    copies: list[Copy] = []

    def refuse(number: int, text: str, reason: str) -> DockerfileError:
        return DockerfileError(f"{file}, line {number}: {text.split(chr(10))[0][:100]!r}: {reason}")

    for number, text in _instructions(file.read_text()):
        word, _, rest = text.partition(" ")
        instruction, rest = word.upper(), rest.strip()
        if instruction == "FROM":
            if base:
                raise refuse(number, text, "only one stage can be carried out locally")
            base = rest.split()[0] if rest else ""
            if re.split(r"[:@]", base.rsplit("/", 1)[-1])[0] not in PLAIN_BASES:
                raise refuse(number, text, f"local sandboxes use the host's system; allowed bases: {', '.join(PLAIN_BASES)}")
        elif instruction in IGNORED:
            continue
        elif not base:
            raise refuse(number, text, "FROM must come first")
        elif instruction == "WORKDIR":
            workdir = str(PurePosixPath(workdir) / _expand(rest.strip("\"'"), env))
        elif instruction == "ENV":
            for key, value in _assignments(rest):
                env[key] = _expand(value, env)
        elif instruction == "COPY":
            try:
                copies.append(_copy(file.parent.resolve(), rest, workdir, env))
            except ValueError as error:
                raise refuse(number, text, str(error)) from None
        else:
            raise refuse(number, text, REASONS.get(instruction, f"{instruction} cannot be carried out locally"))
    if not base:
        raise DockerfileError(f"{file}: there is no FROM")
    return LocalImage(base=base, workdir=workdir, env=env, copies=tuple(copies))


def _instructions(text: str) -> list[tuple[int, str]]:
    """(number of the first line, joined text) of every instruction, without comments."""
    found: list[tuple[int, str]] = []
    pending, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        start = start if pending else number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        found.append((start, (pending + line).strip()))
        pending = ""
    if pending:
        found.append((start, pending.strip()))
    return found


def _assignments(text: str) -> list[tuple[str, str]]:
    if "=" not in text.split(maxsplit=1)[0]:  # the old form: ENV KEY the rest is the value
        key, _, value = text.partition(" ")
        return [(key, value.strip())]
    return [(key, value) for key, _, value in (word.partition("=") for word in shlex.split(text))]


def _expand(text: str, env: dict[str, str]) -> str:
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: env.get(match[1] or match[2], ""), text)


def _copy(context: Path, rest: str, workdir: str, env: dict[str, str]) -> Copy:
    """Raises ValueError with the reason."""
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    if any(word.startswith("--from") for word in words):
        raise ValueError("copying from another image needs an image builder")
    *sources, target = [_expand(word, env) for word in words if not word.startswith("--")] or [""]
    if not sources:
        raise ValueError("COPY needs a source and a target")
    paths: list[Path] = []
    for source in sources:
        relative = source.lstrip("/")
        matches = sorted(context.glob(relative)) if any(mark in source for mark in "*?[") else [context / relative]
        if not matches:
            raise ValueError(f"nothing matches {source!r}")
        for path in matches:
            if not path.resolve().is_relative_to(context):
                raise ValueError(f"{source!r} lies outside the environment directory")
            if not path.exists():
                raise ValueError(f"{source!r} does not exist beside the Dockerfile")
            paths.append(path)
    absolute = str(PurePosixPath(workdir) / target)
    return Copy(sources=tuple(paths), target=absolute, into=target.endswith("/") or target in {".", "./"} or len(paths) > 1)
