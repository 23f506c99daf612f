"""The local stack in a directory of its own, brought up and driven by the command line as a person would."""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from contracts.batches import Manifest
from tests.support.processes import BASE_PYTHON, ROOT

OPENFORGE = BASE_PYTHON.parent / "openforge"
RECIPE = ROOT / "tests/e2e/recipe.yaml"


class Stack:
    """The local stack in a directory, by its command line."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def run(self, *arguments: str, timeout: float = 500, code: int = 0) -> str:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OPENFORGE_")} | {"COLUMNS": "200"}
        done = subprocess.run(
            [OPENFORGE, *arguments, "--home", self.home], cwd=self.home, capture_output=True, text=True, timeout=timeout, env=environment
        )
        assert done.returncode == code, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{self.logs()}"
        return done.stdout + done.stderr

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.home / "stack.json").read_text())
        return state

    def pid(self, name: str) -> int:
        return next(component["pid"] for component in self.state["components"] if component["name"] == name)

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in sorted((self.home / "logs").glob("*.log")))

    def manifest(self, run: str, batch: str) -> Manifest:
        return Manifest.model_validate_json((self.home / "storage/runs" / run / batch / "manifest.json").read_text())

    def rows(self, run: str, batch: str) -> list[dict[str, Any]]:
        files = [result.trajectory.path for result in self.manifest(run, batch).results if result.trajectory]
        return [row for file in files for row in pq.read_table(self.home / "storage" / file).to_pylist()]

    def progress(self, run: str) -> dict[str, Any]:
        binary = BASE_PYTHON.parent / "temporal"
        address = self.state["environment"]["OPENFORGE_TEMPORAL_ADDRESS"]
        command = [binary, "workflow", "query", "--address", address, "-w", run, "--type", "progress", "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        with contextlib.suppress(ValueError, LookupError):
            answer: dict[str, Any] = json.loads(done.stdout)["queryResult"][0]
            return answer
        return {}

    def finished_calls(self) -> set[tuple[str, int]]:
        """(session, sequence) of every call in the proxy's journal, from a copy: a running proxy holds it alone."""
        copy = self.home / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for file in self.home.glob("journal.db*"):
            shutil.copy2(file, copy)
        with sqlite3.connect(copy / "journal.db") as journal:
            return set(journal.execute("SELECT session_id, sequence FROM calls"))

    def sandboxes(self) -> list[str]:
        directory = self.home / "sandboxes"
        return sorted(entry.name for entry in directory.iterdir()) if directory.exists() else []


def until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {seconds} s"
        time.sleep(0.2)
