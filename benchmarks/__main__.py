"""`python -m benchmarks [proxy] [trainer] [iteration]`: run the benchmarks and print their ratios."""

import os
import platform
import sys
from importlib import metadata

from benchmarks import iteration, proxy, trainer

ALL = {"proxy": proxy.main, "trainer": trainer.main, "iteration": iteration.main}


def main() -> None:
    chosen = sys.argv[1:] or list(ALL)
    if unknown := sorted(set(chosen) - set(ALL)):
        sys.exit(f"unknown benchmark {', '.join(unknown)}; known: {', '.join(ALL)}")
    machine = f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}"
    print(f"{machine}, openforgerl {metadata.version('openforgerl')}")
    for name in chosen:
        print(f"\n== {name}", flush=True)
        ALL[name]()


if __name__ == "__main__":
    main()
