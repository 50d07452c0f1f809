"""`skein data`: prepare a task of the Long Range Arena, from official files or by a generator, as one store."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from skeinformer.lab.lra.prepare import Image, ListOps, Pathfinder, Retrieval, Text, prepare_store


@dataclass(frozen=True)
class Data:
    """Prepare the data of a task of the Long Range Arena: one folder that training reads."""

    task: tyro.conf.OmitSubcommandPrefixes[
        tyro.conf.OmitArgPrefixes[
            Annotated[ListOps, tyro.conf.subcommand("listops")]
            | Annotated[Text, tyro.conf.subcommand("text")]
            | Annotated[Retrieval, tyro.conf.subcommand("retrieval")]
            | Annotated[Pathfinder, tyro.conf.subcommand("pathfinder")]
            | Annotated[Image, tyro.conf.subcommand("image")]
        ]
    ]


def command(options: Data) -> None:
    """Prepare, and print where the store is."""
    print(run_data(options), flush=True)


def run_data(options: Data, console: Console | None = None) -> Path:
    """Prepare a task, print what came out, and return the folder of the store."""
    return prepare_store(options.task, console or Console(highlight=False))
