"""Weights and checkpoints in storage.

A version is its directory of Hugging Face files plus `manifest.json`, which is written last: a version without one does not exist.
Tensors are float32 and `config.json` says so. A checkpoint's manifest is written last too; the newest two are kept.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from contracts.identity import checkpoint_prefix, version_prefix
from contracts.updates import UpdateResult, VersionManifest
from infra.storage import Storage

KEEP_CHECKPOINTS = 2


def find_version(storage: Storage, run: str, version: int) -> VersionManifest | None:
    """The manifest of a finished version."""
    try:
        return VersionManifest.model_validate_json(storage.read(f"{version_prefix(run, version)}/manifest.json"))
    except FileNotFoundError:
        return None


def fetch_version(storage: Storage, run: str, version: int, base_model: str, work: Path) -> Path:
    """A local directory with a version's weights; version 0 is the base model itself. Raises FileNotFoundError."""
    if version == 0:
        if not (Path(base_model) / "config.json").is_file():
            raise FileNotFoundError(f"{base_model} holds no config.json: it is not a model directory")
        return Path(base_model)
    if find_version(storage, run, version) is None:
        raise FileNotFoundError(f"run {run} has no version {version}: it cannot be trained further")
    if storage.local_root is not None:
        return storage.local_root / version_prefix(run, version)
    target = work / "weights"
    shutil.rmtree(target, ignore_errors=True)
    storage.download_directory(version_prefix(run, version), target)
    return target


def write_weights(state: dict[str, Any], base: Path, target: Path) -> None:
    """Write float32 weights beside the configuration and tokenizer of `base`, with exactly the tensors that `base` has."""
    from huggingface_hub import save_torch_state_dict

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    expected = set(tensor_names(base))
    missing = expected - set(state)
    if missing:
        raise RuntimeError(f"the engine's weights lack {sorted(missing)[:5]}")
    save_torch_state_dict({name: tensor for name, tensor in state.items() if name in expected}, target, metadata={"format": "pt"})
    for file in sorted(base.iterdir()):
        if file.suffix in {".json", ".jinja", ".txt", ".model"} and not file.name.endswith(".index.json") and file.name != "manifest.json":
            shutil.copy2(file, target / file.name)
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def tensor_names(directory: Path) -> list[str]:
    """Sorted names of all tensors in a directory's safetensors files. Raises FileNotFoundError if there are none."""
    from safetensors import safe_open

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no safetensors file")
    names: list[str] = []
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            names += opened.keys()
    return sorted(names)


def publishable(storage: Storage, run: str, parent: int, directory: Path, batch_digest: str, result: UpdateResult) -> None:
    """Upload a directory as a version that can be published; the manifest last."""
    prefix = version_prefix(run, result.version)
    manifest = VersionManifest(
        run=run,
        version=result.version,
        parent=parent,
        batch_digest=batch_digest,
        files=storage.upload_directory(directory, prefix),
        tensors=tensor_names(directory),
        result=result,
    )
    storage.write(f"{prefix}/manifest.json", manifest.model_dump_json(indent=1).encode())


def save_checkpoint(storage: Storage, run: str, version: int, directory: Path, kind: str) -> None:
    """Upload the trainer's state after making `version`; the marker last. Older ones than the newest two are removed."""
    prefix = checkpoint_prefix(run, version)
    storage.remove(prefix)
    storage.upload_directory(directory, prefix)
    storage.write(f"{prefix}/manifest.json", json.dumps({"version": version, "kind": kind}).encode())
    if version >= KEEP_CHECKPOINTS:
        storage.remove(checkpoint_prefix(run, version - KEEP_CHECKPOINTS))


def fetch_checkpoint(storage: Storage, run: str, version: int, kind: str, work: Path) -> Path | None:
    """A local directory with the trainer's state at `version`, if a whole one of this kind of update exists."""
    prefix = checkpoint_prefix(run, version)
    try:
        if json.loads(storage.read(f"{prefix}/manifest.json"))["kind"] != kind:
            return None
    except FileNotFoundError:
        return None
    target = work / "checkpoint"
    shutil.rmtree(target, ignore_errors=True)
    storage.download_directory(prefix, target)
    (target / "manifest.json").unlink()
    return target
