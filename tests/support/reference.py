"""Plain transformers as the reference for log-probabilities."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import ROOT, TRAINER_PYTHON


def reference_logprobs(model: Path, sequences: Sequence[tuple[list[int], list[int]]], temperature: float = 1.0) -> list[list[float]]:
    """Log-probabilities of each response's tokens after its prompt, by transformers in float32."""
    done = subprocess.run(
        [TRAINER_PYTHON, ROOT / "tests/support/hf_logprobs.py", model, str(temperature)],
        input=json.dumps(sequences), capture_output=True, text=True, timeout=120, env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: list[list[float]] = json.loads(done.stdout)
    return answers
