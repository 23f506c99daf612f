"""Harnesses from the registries, in their pinned versions, each in a directory of its own below `.tools/harnesses`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

DIRECTORY = ROOT / ".tools/harnesses"
NPM = {"openclaw": "openclaw@2026.9.6", "pi": "@earendil-works/pi-coding-agent@1.6.0"}
PYPI = {"mini": "mini-swe-agent==2.4.6"}


def program(name: str) -> Path:
    """The command `name`, installed if it is not there yet. Skips the test where a harness needs Node.js and there is none."""
    package = (NPM | PYPI)[name]
    home = DIRECTORY / package.replace("/", "-").lstrip("@")
    command = home / ("bin" if name in PYPI else "node_modules/.bin") / name
    if command.exists():
        return command
    shutil.rmtree(home, ignore_errors=True)
    if name in PYPI:
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        subprocess.run([home / "bin/pip", "install", "--quiet", "--disable-pip-version-check", package], check=True)
        return command
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"{name} needs Node.js, and there is no npm")
    home.mkdir(parents=True)
    subprocess.run(
        [npm, "install", "--prefix", home, "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error", package],
        check=True,
        env={**os.environ, "npm_config_update_notifier": "false"},
    )
    return command


def run(command: list[str | Path], home: Path, environment: dict[str, str], timeout: float = 300) -> str:
    """Run a harness to its end in `home/work`, with `home` as its HOME; returns what it printed. Its exit code must be 0."""
    work = home / "work"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "TZ": "UTC", "LANG": "C.UTF-8", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
