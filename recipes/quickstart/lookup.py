"""Generator of the quickstart's tasks: look one field of one name up in a file and write it to `answer.txt`.

Every task is a Harbor directory with its own file of random rows; the answer is in the file alone, so no one who has not looked knows
it. Names are pairs of words. The pairs of the three sets (demonstrations, training, held out) are disjoint, and so are their rows.
"""

import random
from dataclasses import dataclass
from pathlib import Path

FIRST = (
    "amber birch cedar coral crimson dawn ember fern flint frost golden granite hazel indigo ivory jade juniper lemon lilac linen "
    "maple marble mint misty ochre olive onyx opal pearl pine quartz raven ruby russet sable saffron silver slate umber velvet"
).split()
SECOND = (
    "anchor arrow badger basin beacon bridge canyon castle comet crane delta falcon forest garden glacier harbor heron island kettle "
    "lantern lynx meadow mill orchard otter panther prairie quarry rapid ridge river robin sparrow spring stag summit tiger valley "
    "walrus willow"
).split()
PEOPLE = "alice bruno carla diego elena farid greta hiro ines jonas kavya leon mira nils olga pedro".split()
TEAMS = "billing catalog checkout data edge identity mobile payments search storage".split()
ROOMS = "attic cellar east lab lobby north office south vault west".split()


@dataclass(frozen=True)
class Kind:
    """A kind of file: `name=column=column` a line."""

    file: str
    columns: tuple[str, ...]


KINDS = (
    Kind("services.txt", ("port", "protocol")),
    Kind("hosts.txt", ("address", "room")),
    Kind("owners.txt", ("owner", "team")),
    Kind("stock.txt", ("count",)),
)
QUESTIONS = tuple((kind, column) for kind in KINDS for column in range(len(kind.columns)))

WORDINGS = (
    "In `{file}`, find the {column} of `{name}`. Write it to `answer.txt`.",
    "What is the {column} of `{name}`? Look into `{file}` and write it to `answer.txt`.",
    "Write the {column} of `{name}` to `answer.txt`. It is in `{file}`.",
    "The file `{file}` lists the {column} of `{name}`. Put it into `answer.txt`.",
)


@dataclass(frozen=True)
class Lookup:
    """One task: what is asked, and the file that holds the answer."""

    id: str
    kind: Kind
    column: int
    name: str
    wording: str
    rows: tuple[tuple[str, ...], ...]

    @property
    def instruction(self) -> str:
        return self.wording.format(file=self.kind.file, column=self.kind.columns[self.column], name=self.name)

    @property
    def command(self) -> str:
        """What solves it."""
        return solution(self.kind.file, self.name, self.column)

    @property
    def answer(self) -> str:
        return next(row[self.column + 1] for row in self.rows if row[0] == self.name)

    @property
    def content(self) -> str:
        return "".join("=".join(row) + "\n" for row in self.rows)


def solution(file: str, name: str, column: int) -> str:
    """The command that writes column `column` (0 is the first after the name) of `name` in `file` to answer.txt."""
    return f"grep '^{name}=' {file} | cut -d= -f{column + 2} > answer.txt"


def _value(column: str, draw: random.Random) -> str:
    choices = {
        "port": lambda: str(draw.randint(1024, 65535)),
        "protocol": lambda: draw.choice(["amqp", "ftp", "grpc", "http", "imap", "ldap", "smtp", "ssh"]),
        "address": lambda: ".".join(["10", *(str(draw.randint(1, 254)) for _ in range(3))]),
        "room": lambda: draw.choice(ROOMS),
        "owner": lambda: draw.choice(PEOPLE),
        "team": lambda: draw.choice(TEAMS),
        "count": lambda: str(draw.randint(1, 999)),
    }
    return choices[column]()


def split_names(seed: int) -> dict[str, list[str]]:
    """All names, split: 60 % for demonstrations, 25 % for training, the rest held out."""
    names = [f"{first}-{second}" for first in FIRST for second in SECOND]
    random.Random(f"names:{seed}").shuffle(names)
    a, b = int(len(names) * 0.6), int(len(names) * 0.85)
    return {"demonstrations": names[:a], "train": names[a:b], "held_out": names[b:]}


def lookups(split: str, count: int, seed: int) -> list[Lookup]:
    """`count` tasks of a split, the questions in turn, each about another name while names last."""
    names = split_names(seed)[split]
    draw = random.Random(f"{split}:{seed}")
    tasks = []
    for number in range(count):
        kind, column = QUESTIONS[number % len(QUESTIONS)]
        name = names[number % len(names)]
        others = draw.sample([other for other in names if other != name], draw.randint(5, 9))
        rows = [(row, *(_value(title, draw) for title in kind.columns)) for row in [name, *others]]
        draw.shuffle(rows)
        wording = draw.choice(WORDINGS)
        tasks.append(Lookup(f"{split.replace('_', '-')}-{number:04d}", kind, column, name, wording, tuple(rows)))
    return tasks


def write_task(task: Lookup, directory: Path) -> None:
    """Write a task as a Harbor directory."""
    files = {
        "task.toml": f"""schema_version = "1.4"

[task]
name = "openforge/{task.id}"
keywords = ["lookup", "{task.kind.columns[task.column]}"]

[agent]
timeout_sec = 60

[verifier]
timeout_sec = 30

[environment]
cpus = 1
memory_mb = 1024
network_mode = "no-network"
""",
        "instruction.md": task.instruction + "\n",
        "environment/Dockerfile": f"FROM debian:bookworm-slim\nWORKDIR /app\nCOPY {task.kind.file} .\n",
        f"environment/{task.kind.file}": task.content,
        "solution/solve.sh": f"#!/bin/bash\n{task.command}\n",
        "tests/test.sh": """#!/bin/bash
# The answer must be the first line of answer.txt, alone.
if [ -f answer.txt ] && [ "$(cat answer.txt)" = "$(cat /tests/expected.txt)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
""",
        "tests/expected.txt": task.answer + "\n",
    }
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.endswith(".sh"):
            path.chmod(0o755)
