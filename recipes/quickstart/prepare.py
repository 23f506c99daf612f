"""Make what the quickstart needs: tasks, tokenizer and a random policy. `prepare.py --out DIR --seed N`, with the base python."""

import argparse
import subprocess
import sys
from pathlib import Path

from capture import capture
from lookup import Lookup, lookups, write_task
from tokenizer import make_tokenizer

from activities.harnesses.codex import CodexOptions

INSTRUCTIONS = "Use one command."
DEMONSTRATIONS, TRAIN, MEASURED = 800, 256, 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainer-python", default=sys.executable, help="an interpreter with torch and transformers")
    parser.add_argument("--demonstrations", type=int, default=DEMONSTRATIONS, help="tasks that the teacher demonstrates")
    parser.add_argument("--train", type=int, default=TRAIN, help="tasks that reinforcement learning works on")
    parser.add_argument("--measured", type=int, default=MEASURED, help="tasks of each evaluation split")
    arguments = parser.parse_args()
    demonstrations = lookups("demonstrations", arguments.demonstrations, arguments.seed)
    train = lookups("train", arguments.train, arguments.seed)
    held_out = lookups("held_out", arguments.measured, arguments.seed)
    sets = {"demonstrations": demonstrations, "train": train, "measured-train": train[: arguments.measured], "measured-held-out": held_out}
    for name, tasks in sets.items():
        for task in tasks:
            write_task(task, arguments.out / "tasks" / name / task.id)
    print(", ".join(f"{len(tasks)} {name}" for name, tasks in sets.items()), flush=True)

    example = train[0]
    captured = capture(CodexOptions(instructions=INSTRUCTIONS), example.instruction, {example.kind.file: example.content}, example.command)
    model = arguments.out / "model"
    make_tokenizer([*demonstrations, *train], INSTRUCTIONS, captured).save_pretrained(model)
    script = Path(__file__).with_name("model.py")
    subprocess.run([arguments.trainer_python, str(script), str(model), "--seed", str(arguments.seed)], check=True)
    _example(held_out[0])


def _example(task: Lookup) -> None:
    print(f"for example: {task.instruction!r} is solved by {task.command!r}")


if __name__ == "__main__":
    main()
