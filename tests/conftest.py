"""Fixtures of more than one area. Servers are started once a session, when the first test asks for them."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.processes import ROOT, TRAINER_PYTHON
from tests.support.vllm import Vllm, vllm_server

settings.register_profile("openforge", deadline=None)  # a busy machine is not a wrong answer
settings.load_profile("openforge")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random Qwen3 with its tokenizer."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    script = ROOT / "tests/support/tiny_model.py"
    made = subprocess.run([TRAINER_PYTHON, script, directory], capture_output=True, text=True, env={"OMP_NUM_THREADS": "1"})
    assert made.returncode == 0, made.stderr
    return directory


@pytest.fixture(scope="session")
def vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """A real vLLM server that holds the tiny model. Tests set its weight label as they need it."""
    with vllm_server(tiny_model, tmp_path_factory.mktemp("vllm") / "vllm.log") as server:
        yield server
