"""The `openforge` command."""

import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from cli import runs, stack, tasks, train, trajectories
from cli.problems import UserError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="""Train language-model agents by reinforcement learning inside the harness they are deployed with.

Start with **openforge doctor**, then **openforge train recipes/quickstart**: it starts everything it needs on this machine, trains, and
writes a report. While it runs, **openforge status** and the Temporal UI show it; Ctrl-C leaves it running.
""",
)
COMMANDS: dict[str, dict[str, Callable[..., Any]]] = {
    "Runs": {
        "train": train.train,
        "status": runs.status,
        "pause": runs.pause,
        "resume": runs.resume,
        "stop": runs.stop,
        "extend": runs.extend,
        "eval": runs.evaluate,
        "rollout": runs.rollout,
        "report": runs.report,
    },
    "Local stack": {"up": stack.up, "down": stack.down, "doctor": stack.doctor},
}
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)
app.add_typer(tasks.app, name="tasks", help="Read and check task directories.", rich_help_panel="Data")
app.add_typer(trajectories.app, name="trajectories", help="Look at what was recorded.", rich_help_panel="Data")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and end the process. A user's mistake is told without a traceback, and ends with exit code 2."""
    code = _run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the Temporal client's threads may touch the interpreter while it is being torn down, and abort the process


def _run(arguments: list[str] | None) -> int:
    try:
        app(arguments)
    except UserError as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


if __name__ == "__main__":
    main()
