"""Real Codex, outside a sandbox, against a proxy: what it is given comes from the adapter."""

import os
import subprocess
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from activities.harnesses.base import HarnessContext
from activities.harnesses.codex import MOUNT, Codex, CodexOptions


def run_codex(
    directory: Path, url: str, key: str, *, model: str, options: dict[str, Any] | None = None, without: tuple[str, ...] = ()
) -> Path:
    """Run Codex until it ends well; returns the directory it worked in.

    `options` are those of the harness, `without` arguments of its command that are left out.
    """
    work = directory / "work"
    work.mkdir()
    codex = Codex(CodexOptions.model_validate(options or {}))
    context = HarnessContext(
        instruction="Go.",
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
    arguments = [argument for argument in codex.command(context)[1:] if argument not in without]
    done = subprocess.run(
        [codex.read_only()[MOUNT] / "bin/codex", *arguments],
        env={**codex.env(context), "PATH": os.environ["PATH"], "HOME": str(directory)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return work
