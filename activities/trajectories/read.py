"""Reading trajectories and manifests again, for people's tools."""

import io

import pyarrow as pa
import pyarrow.parquet as pq

from contracts.batches import Manifest
from contracts.identity import manifest_path
from contracts.trajectory import TRAJECTORY_SCHEMA
from infra.storage import Storage


def batches(storage: Storage, run: str) -> list[str]:
    """Names of the run's sealed batches, in order."""
    prefix = f"runs/{run}/"
    found = (path.removeprefix(prefix).split("/") for path in storage.list(prefix.rstrip("/")))
    sealed = {parts[0] for parts in found if parts[1:] == ["manifest.json"]}
    return sorted(batch for batch in sealed if batch.startswith(("iteration=", "evaluation=")))


def read_manifest(storage: Storage, run: str, batch: str) -> Manifest:
    """Raises FileNotFoundError if the batch is not sealed."""
    return Manifest.model_validate_json(storage.read(manifest_path(run, batch)))


def read_trajectory(storage: Storage, path: str) -> pa.Table:
    """The rows of one rollout. Raises FileNotFoundError."""
    return pq.read_table(io.BytesIO(storage.read(path)), schema=TRAJECTORY_SCHEMA)


def read_batch(storage: Storage, manifest: Manifest) -> pa.Table:
    """The rows of all rollouts of a batch."""
    tables = [read_trajectory(storage, result.trajectory.path) for result in manifest.results if result.trajectory]
    return pa.concat_tables(tables) if tables else TRAJECTORY_SCHEMA.empty_table()
