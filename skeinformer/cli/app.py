"""`skein`: the command line. COMMANDS has its verbs, and `guard` prints errors of the user in one line."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import skeinformer

T = TypeVar("T")
# modules of the extras: a missing one is the user's to install, any other missing module is a defect
EXTRAS = {
    **dict.fromkeys(("tyro", "rich", "transformers", "tokenizers", "safetensors", "matplotlib", "jinja2"), "cli"),
    **dict.fromkeys(("pyarrow", "scipy"), "benchmarks"),
    **dict.fromkeys(("accelerate", "huggingface_hub", "pandas", "tensorboard"), "train"),
}
USER_ERROR, INTERRUPTED, CLOSED_PIPE = 2, 130, 141


def commands() -> dict[str, Any]:
    """Return the verbs, each a dataclass of options with a method `run`."""
    from skeinformer.cli.bench import Bench
    from skeinformer.cli.compare import Compare
    from skeinformer.cli.demo import Demo
    from skeinformer.cli.methods import Methods

    return {"demo": Demo, "compare": Compare, "bench": Bench, "methods": Methods}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `skein` and return its exit status: 0 done, 2 an error of the user, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if list(arguments) == ["--version"]:
        print(f"skeinformer {skeinformer.__version__}")
        return 0
    return guard(lambda: parse(arguments).run())


def parse(arguments: Sequence[str]) -> Any:
    """Read a verb with its options; `--help` prints them and exits."""
    verbs = commands()
    if arguments and arguments[0] in verbs:
        return read_options(verbs[arguments[0]], f"skein {arguments[0]}", arguments[1:])
    import tyro

    about = "Sketched self-attention for long sequences."
    return tyro.extras.subcommand_cli_from_dict(verbs, prog="skein", description=about, args=arguments)


def read_options(kind: type[T], program: str, arguments: Sequence[str] | None = None) -> T:
    """Read the options of a dataclass from the command line."""
    import tyro

    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    return tyro.cli(kind, prog=program, args=arguments, config=config)


def guard(work: Callable[[], object], name: str = "skein") -> int:
    """Run a function and return an exit status. Errors of the user are printed in one line that begins with `name`."""
    try:
        work()
        return 0
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        extra = EXTRAS[missing]
        message = f"this needs {missing}, which is not installed: pip install 'skeinformer[{extra}]'"
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    except (ValueError, ChildProcessError, skeinformer.distributed.RankError) as error:
        message = str(error)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    line = "".join(x if x.isprintable() else repr(x)[1:-1] for x in " ".join(message.split()))
    print(f"{name}: {line}", file=sys.stderr)
    return USER_ERROR
