"""What the trainer adds to veRL: an update (read, recompute, estimate, train, save, export) and the bare veRL loop on the same rows."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.processes import ROOT, TRAINER_PYTHON


def main() -> None:
    subprocess.run(
        [TRAINER_PYTHON, "-m", "benchmarks.trainer"], check=True, cwd=ROOT, env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    )


def measure() -> None:
    """In the trainer's environment."""
    import logging
    import random
    import time
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    from trainer import platform_cpu

    platform_cpu.activate()
    from contracts.config import TrainingConfig
    from contracts.updates import UpdateRequest
    from infra.storage import Storage
    from tests.trainer.synthetic import Made, seal
    from trainer.batches import read_batch, read_manifest
    from trainer.engine import Engine
    from trainer.updates import Updater

    draw = random.Random(0)
    made = [
        Made(
            place // 8,
            [draw.randrange(9, 400) for _ in range(40)],
            [draw.randrange(9, 400) for _ in range(60)],
            [-6.0] * 60,
            float(place % 2),
        )
        for place in range(96)
    ]
    method = TrainingConfig(iterations=1, mini_batch_size=32, micro_batch_size=32, learning_rate=1e-5)
    with tempfile.TemporaryDirectory() as name:
        model, storage = Path(name) / "model", Storage(f"file://{name}/storage")
        (Path(name) / "work").mkdir()
        subprocess.run([sys.executable, str(ROOT / "tests/support/tiny_model.py"), str(model)], check=True, capture_output=True)
        manifests = [seal(storage, "bench", number, made) for number in range(4)]
        updater = Updater(storage, Path(name) / "work")
        times = []
        for number, path in enumerate(manifests):
            request = UpdateRequest(run="bench", iteration=number, manifest=path, base_model=str(model), max_context=256, method=method)
            started = time.perf_counter()
            updater.run(request, lambda *_: None)
            times.append(time.perf_counter() - started)
        batch = read_batch(storage, read_manifest(storage, manifests[0]), max_context=256)
        engine = Engine(model, method, max_row=256)
        bare = []
        for _ in range(4):
            started = time.perf_counter()
            old, _entropy = engine.logprobs(batch.rows, 1.0)
            for start in range(0, 96, 32):
                rows = batch.rows[start : start + 32]
                engine.policy_step(rows, old[start : start + 32], [[1.0] * 60] * 32, 1.0, entropy=False)
            bare.append(time.perf_counter() - started)
    update, loop = min(times[1:]), min(bare[1:])
    print(f"update of 96 rows: {update:.2f} s (the first, which loads the engine: {times[0]:.2f} s)")
    print(f"bare veRL loop on the same rows: {loop:.2f} s")
    print(f"ratio {update / loop:.2f}")


if __name__ == "__main__":
    measure()
