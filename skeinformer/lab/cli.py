"""`skein`: the command line. COMMANDS is the one table of its verbs; only the verb that is called is loaded.

A verb VERB is `lab/commands/VERB.py`: a frozen dataclass of options called Verb, which tyro fills, and a function
`command` of it. tyro, rich and what the commands need beyond torch and numpy come with the extra `lab`; without them
`skein` says what to install.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from skeinformer import __version__
from skeinformer.checks import lookup, nearest_option
from skeinformer.distributed import RankError

T = TypeVar("T")


class Command(NamedTuple):
    """Where a verb is, and what it does, in a line."""

    module: str
    help: str


COMMANDS: dict[str, Command] = {
    "data": Command("skeinformer.lab.commands.data", "prepare the data of a task of the Long Range Arena"),
    "train": Command("skeinformer.lab.commands.train", "train one model on one task of the Long Range Arena"),
    "lra": Command("skeinformer.lab.commands.lra", "train a matrix of tasks, methods and seeds, and go on with it"),
}
# the modules of the extra `lab`: a missing one is the user's to install, any other missing module is a defect
LAB_MODULES = {"tyro", "rich", "transformers", "tokenizers", "safetensors", "matplotlib", "pyarrow", "PIL"}
# and of the extra `train`, which includes it
TRAIN_MODULES = {"accelerate", "tensorboard", "huggingface_hub"}
USER_ERROR = 2
INTERRUPTED, CLOSED_PIPE = 130, 141  # 128 and the number of the signal, as shells have it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `skein` and return its exit status: 0 done, 2 an error that the user can mend, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    return guard(lambda: run(arguments))


def guard(work: Callable[[], int], name: str = "skein") -> int:
    """The exit status of `work`. Errors that the user can mend are said in one line, which begins with `name`."""
    try:
        return work()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in LAB_MODULES | TRAIN_MODULES:
            raise
        extra = "train" if missing in TRAIN_MODULES else "lab"
        return fail(f"this needs {missing}, which is not installed: pip install 'skeinformer[{extra}]'", name)
    except FileNotFoundError as error:
        return fail(f"there is no {error.filename}" if error.filename else str(error), name)
    except BrokenPipeError:  # whoever read the output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error), name)
    except (ValueError, RankError) as error:
        return fail(str(error), name)
    except KeyboardInterrupt:
        return fail("interrupted", name, INTERRUPTED)


def run(arguments: Sequence[str]) -> int:
    """Load the verb that the arguments begin with, read its options, and run it."""
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    if verb == "--version":
        print(f"skeinformer {__version__}")
        return 0
    if verb in ("", "-h", "--help"):
        print_help(to_stderr=not verb)
        return 0 if verb else USER_ERROR
    command = lookup("command", verb, COMMANDS)
    module = import_module(command.module)
    module.command(read_options(getattr(module, verb.capitalize()), f"skein {verb}", rest))
    return 0


def read_options(kind: type[T], program: str, arguments: Sequence[str]) -> T:
    """The options in the arguments. A ValueError names the nearest option to one that `program` does not have."""
    from skeinformer.lab.helptext import parse

    known = list(option_words(kind))
    for argument in arguments[: arguments.index("--") if "--" in arguments else None]:
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and name not in (*known, "help"):
            nearest = nearest_option(name, known)
            suggestion = f"; did you mean {_flag(nearest)}?" if nearest else "."
            raise ValueError(f"{program} has no option {_flag(name)}{suggestion} `{program} --help` prints them all.")
    return parse(kind, program, arguments)


def option_words(kind: Any) -> Iterator[str]:
    """The names of the options that a dataclass stands for, with those of its parts: "no_baseline" is one."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        parts = [part for part in (hint, *get_args(hint)) if is_dataclass(part)]
        for part in parts:
            yield from option_words(part)
        if not parts:
            yield f"no_{field.name}" if field.default is True and hints[field.name] is bool else field.name


def print_help(to_stderr: bool = False) -> None:
    """Print the verbs, a line for each."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2))
    for verb, command in COMMANDS.items():
        table.add_row(Text(verb, style="bold"), Text(command.help))
    console = Console(stderr=to_stderr, highlight=False)
    console.print("usage: skein [-h] [--version] COMMAND ...\n", markup=False)
    console.print("Sketched self-attention for long sequences.\n")
    console.print(table)
    console.print("\n`skein COMMAND --help` prints the options of a command.")


def fail(message: str, name: str = "skein", status: int = USER_ERROR) -> int:
    """Say in one line what is wrong, and return the exit status.

    The names in a stranger's file may hold what steers a terminal: it is shown as \\x1b and the like.
    """
    line = "".join(x if x.isprintable() else repr(x)[1:-1] for x in " ".join(message.split()))
    print(f"{name}:", line, file=sys.stderr)
    return status


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
