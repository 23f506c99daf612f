"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Home = Annotated[Path, typer.Option(envvar="OPENFORGE_HOME", help="Directory of the local stack: state, logs, storage.", show_default=True)]
DEFAULT_HOME = Path(".openforge")
RecipeArgument = Annotated[Path, typer.Argument(help="A recipe file, or a directory that holds recipe.yaml.")]
Name = Annotated[str | None, typer.Option(help="Name of the run in place of the recipe's.")]
Seed = Annotated[int | None, typer.Option(help="Seed in place of the recipe's.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="KEY.PATH=VALUE in place of the recipe's; may be repeated.")]
Run = Annotated[str, typer.Argument(help="Name of the run.")]
