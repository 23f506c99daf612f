"""Real Codex, outside a sandbox, against a proxy: what it is given comes from the adapter."""

import os
import subprocess
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from activities.harnesses.base import HarnessContext
from activities.harnesses.codex import MOUNT, Codex, CodexOptions


def run_codex(directory: Path, url: str, key: str, *, model: str, instruction: str = "Go.", options: dict[str, Any] | None = None) -> Path:
    """Run Codex until it ends well; returns the directory it worked in. `options` are those of the harness."""
    work = directory / "work"
    work.mkdir()
    codex = Codex(CodexOptions.model_validate(options or {}))
    context = HarnessContext(
        instruction=instruction,
        workdir=str(work),
        home=str(directory),
        api_key=SecretStr(key),
        base_url=url,
        model=model,
        max_context=100_000,
    )
    for path, content in codex.files(context).items():
        assert isinstance(content, bytes)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)
    done = subprocess.run(
        [codex.read_only()[MOUNT] / "bin/codex", *codex.command(context)[1:]],
        env={**codex.env(context), "PATH": os.environ["PATH"], "HOME": str(directory)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return work
