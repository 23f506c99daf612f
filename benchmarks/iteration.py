"""Where the seconds of an iteration go: the tests' small recipe on the whole local stack, harness seconds against all others."""

import json
import subprocess
import tempfile
from pathlib import Path

from tests.support.processes import BASE_PYTHON, ROOT


def main() -> None:
    command = BASE_PYTHON.parent / "openforge"
    with tempfile.TemporaryDirectory() as home:
        common = ["--home", home]
        changes = ["--set", "rollout.groups=8", "--set", "rollout.group_size=4", "--set", "evaluation.splits={}"]
        try:
            subprocess.run([command, "train", ROOT / "tests/e2e/recipe.yaml", *changes, *common], check=True, cwd=home, capture_output=True)
            done = subprocess.run([command, "report", "e2e", "--json", *common], check=True, cwd=home, capture_output=True, text=True)
        finally:
            subprocess.run([command, "down", *common], check=True, cwd=home, capture_output=True)
        report = json.loads(done.stdout)
        assert Path(home).exists()
    last = report["iterations"][-1]
    phases = last["batch"]["phases"]
    whole = sum(phases.values())
    print(
        f"mean seconds of a rollout by phase (32 rollouts, 4 at once): {', '.join(f'{name} {value:.2f}' for name, value in phases.items())}"
    )
    print(f"share of the harness: {phases['harness'] / whole:.2f} of a rollout")
    print(f"update: {', '.join(f'{name} {value:.2f}' for name, value in last['update']['seconds'].items())} seconds")
