"""`python -m trainer --host H --port P --work-dir DIR`, in the trainer's environment."""

import argparse
from pathlib import Path

from trainer import platform_cpu


def main() -> None:
    parser = argparse.ArgumentParser(prog="trainer", description="Serve policy updates with veRL.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--work-dir", type=Path, required=True, help="scratch space: exports and checkpoints before they are stored")
    arguments = parser.parse_args()

    platform_cpu.activate()
    import uvicorn
    import verl.workers.engine_workers  # noqa: F401  (takes ten seconds: before the port opens, not in the first update)

    from infra.settings import settings
    from trainer.service import create_app

    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    uvicorn.run(create_app(settings(), arguments.work_dir), host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
