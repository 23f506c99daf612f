"""The whole job with a real S3 server as its storage."""

import os
import signal
from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest
import s3fs

from contracts.batches import Manifest
from tests.support.stack import RECIPE, Stack, until

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.trainer]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("home"))
    made.run("up", str(RECIPE), "--s3", "--detach")
    yield made
    made.run("down")


def test_a_run_outlives_its_storage_and_leaves_everything_in_the_bucket(stack: Stack) -> None:
    stack.run("train", str(RECIPE), "--name", "remote", "--set", "training.iterations=1", "--detach")
    until(lambda: stack.progress("remote").get("in_flight", {}).get("completed", 0) > 4, 120, "the first rollouts")
    os.kill(stack.pid("seaweedfs"), signal.SIGKILL)
    printed = stack.run("train", str(RECIPE), "--name", "remote", "--set", "training.iterations=1")
    assert "iteration 1 (rl)" in printed
    assert "on the same tasks:" in printed

    env = stack.state["environment"]
    files = s3fs.S3FileSystem(
        key=env["AWS_ACCESS_KEY_ID"],
        secret=env["AWS_SECRET_ACCESS_KEY"],
        client_kwargs={"endpoint_url": env["OPENFORGE_S3_ENDPOINT"]},
    )
    root = env["OPENFORGE_STORAGE_URL"].removeprefix("s3://")
    for batch in ("iteration=000000", "iteration=000001"):
        manifest = Manifest.model_validate_json(files.cat(f"{root}/runs/remote/{batch}/manifest.json"))
        assert manifest.ledger.completed + sum(manifest.ledger.truncated.values()) == manifest.ledger.started
        for result in manifest.results:
            assert result.trajectory
            with files.open(f"{root}/{result.trajectory.path}") as file:
                assert pq.read_table(file).num_rows == result.trajectory.rows
    assert files.exists(f"{root}/runs/remote/versions/version=000002/manifest.json")
    assert stack.sandboxes() == []
