"""Files are written whole, through no planted link; sealed JSON shows every flipped bit; only plain files are read."""

import json
import os
from pathlib import Path

import pytest

from skeinformer.lab.files import open_plain, parse_json, read_plain, remove_any, seal, synced, unseal, write_whole


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".page.html.{os.getpid()}").symlink_to(victim)  # the name that could once be guessed
    (tmp_path / "page.html").symlink_to(victim)
    write_whole("a page", tmp_path / "page.html")
    assert victim.read_text() == "precious"
    assert (tmp_path / "page.html").read_text() == "a page"
    (tmp_path / "weights").symlink_to(victim)
    with pytest.raises(FileExistsError), synced(tmp_path / "weights"):
        pass
    assert victim.read_text() == "precious"


def test_the_temporary_file_lies_beside_its_target_and_an_error_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def refuse(self: Path, target: Path) -> Path:
        seen.append(self)
        raise OSError("no rename today")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no rename today"):
        write_whole("a page", tmp_path / "new" / "page.html")
    (temporary,) = seen
    assert temporary.parent == tmp_path / "new"
    assert list((tmp_path / "new").iterdir()) == []


def test_a_written_file_has_the_usual_rights(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    written = write_whole("", tmp_path / "written")
    assert written.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_link_is_removed_and_not_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "link").symlink_to("folder")
    remove_any(tmp_path / "link")
    assert (tmp_path / "folder" / "file").exists()
    remove_any(tmp_path / "folder")
    remove_any(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_every_flipped_bit_of_sealed_json_is_found() -> None:
    data = {"step": 3, "loss": 0.25, "name": "ä", "parts": {"a": [1, None, True]}}
    content = seal(data)
    assert unseal(content, "x") == data
    for place in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(ValueError, match=r"^x (was altered|is not JSON|has no checksum|holds)"):
            unseal(bytes(flipped), "x")
    with pytest.raises(ValueError, match="has no checksum: an earlier version wrote it"):
        unseal(json.dumps(data).encode(), "x")


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"[1]", b"nonsense", b"\xff"])
def test_json_that_is_no_object_is_named(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^run\.json (is not JSON|holds a JSON list, expected an object)"):
        parse_json(content, "run.json")


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_plain(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="file has more than 4 bytes"):
        read_plain(tmp_path / "file", 4)
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(ValueError, match="link is a link; only plain files are read"):
        open_plain(tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="fifo is neither a file nor a folder"):  # it would wait for a writer
        open_plain(tmp_path / "fifo")
