"""The sheet of Pathfinder images is written whole."""

from pathlib import Path

from PIL import Image

from skeinformer.lab.report.pathfinder_sheet import write_sheet


def test_the_sheet_is_a_picture(tmp_path: Path) -> None:
    path = write_sheet(tmp_path / "folder" / "sheet.png", seed=1)
    with Image.open(path) as picture:
        assert picture.width > picture.height > 500
        colors = picture.convert("RGB").getcolors(1 << 20)
    assert len(colors) > 100  # gray levels and the colours of the snakes
    assert [item.name for item in path.parent.iterdir()] == ["sheet.png"]
