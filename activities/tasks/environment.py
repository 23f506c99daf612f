"""Carry out a task's environment in a sandbox that was just created."""

from pathlib import Path, PurePosixPath

from activities.sandboxes.base import SandboxBackend
from activities.tasks.harbor import Task


def environment_files(task: Task) -> dict[str, bytes | Path]:
    """Absolute sandbox path to the host file or directory that the Dockerfile copies there."""
    files: dict[str, bytes | Path] = {}
    for copy in task.image.copies:
        for source in copy.sources:
            if source.is_dir():  # COPY of a directory copies what is in it
                files.update({str(PurePosixPath(copy.target) / child.name): child for child in sorted(source.iterdir())})
            elif copy.into:
                files[str(PurePosixPath(copy.target) / source.name)] = source
            else:
                files[copy.target] = source
    return files


async def prepare(backend: SandboxBackend, sandbox: str, task: Task) -> None:
    """Put the files of the task's environment in place."""
    if files := environment_files(task):
        await backend.put(sandbox, files)
