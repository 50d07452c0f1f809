"""What a record says of the machine, the command and the commit, without the folders of the machine."""

import subprocess
from pathlib import Path

import pytest
import torch

import skeinformer
import skeinformer.lab.machine as module
from skeinformer.lab.machine import machine
from skeinformer.lab.records import check


def test_machine_is_a_record_of_what_ran() -> None:
    found = check(machine())
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert isinstance(found["cpu"], str)
    assert found["cpu"]
    assert isinstance(found["command"], str)
    assert "/" not in found["command"].split()[0]


def test_the_module_run_by_python_is_called_skein(monkeypatch: pytest.MonkeyPatch) -> None:
    main = Path(skeinformer.__file__).with_name("__main__.py")
    monkeypatch.setattr("sys.argv", [str(main), "approx", "--text", "a b.txt"])
    assert machine()["command"] == "skein approx --text 'a b.txt'"
    monkeypatch.setattr("sys.argv", ["elsewhere/__main__.py"])
    assert machine()["command"] == "__main__.py"


def test_the_command_names_files_without_the_folders_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["skein", "approx", "--text", str(tmp_path / "a.txt"), "--records", "b/c.jsonl"])
    assert machine()["command"] == "skein approx --text a.txt --records b/c.jsonl"


def test_the_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert module._commit(tmp_path) is None
    git("init", "--quiet")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "--message", "one")
    commit = git("rev-parse", "HEAD")
    assert module._commit(tmp_path) == commit[:12]
    assert module._commit(tmp_path / "sub") is None
    (tmp_path / "file").write_text("2")
    assert module._commit(tmp_path) == f"{commit[:12]} with changes"
