"""`fedbn-flwr data check` names what is missing or broken, each in one line."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedbn_flwr.data import DATASETS
from fedbn_flwr.data.check import Finding, check_dataset
from fedbn_flwr.data.sets.catalog import CATALOG
from fedbn_flwr.experiments import main
from tests.helpers.image_sets import WRITERS, paint, write_cityscapes, write_imagenet

#: data sets that have no files of their own
MADE = {"digits", "digits-domains", "fashion-domains", "synthetic", "sites", "streets"}


def test_every_data_set_of_files_is_in_the_catalog() -> None:
    assert set(CATALOG) == set(DATASETS) - MADE
    assert all(published.licence and published.sources for published in CATALOG.values())


#: values of all classes
OTHERS = (8, 11, 12, 13, 17, *range(19, 29), 31, 32)
WHOLE = {
    "imagenet": ["train: 12 images in 3 of 3 classes", "test: 6 images in 3 of 3 classes"],
    "tiny-imagenet": ["train: 6 images in 2 of 2 classes"],
    "office-caltech-10": ["train: 80 images in 10 of 10 classes; amazon 20, caltech 20, dslr 20, "],
    "digits-five": ["test: 50 images in 10 of 10 classes; mnist 10, svhn 10, usps 10"],
    "cityscapes": ["aachen 2, bochum 1, frankfurt 0", "test: 2 of 2 label maps decoded, with 19 classes"],
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_files(tmp_path: Path, name: str) -> None:
    home = WRITERS[name](tmp_path)
    if name == "cityscapes":
        write_cityscapes(home, others=OTHERS)
    found = list(check_dataset(name, str(home)))
    assert {finding.verdict for finding in found} == {"ok"}
    for text in WHOLE[name]:
        assert any(text in finding.text for finding in found)


def faults(name: str, home: Path, images: int = 100) -> list[Finding]:
    found = list(check_dataset(name, str(home), images))
    assert all("\n" not in str(finding) for finding in found)
    return [finding for finding in found if finding.verdict != "ok"]


def test_a_corrupted_file_is_found_among_all_or_a_sample(tmp_path: Path) -> None:
    home = write_imagenet(tmp_path)
    path = home / "train" / "n00000001" / "n00000001_1.JPEG"
    path.write_bytes(path.read_bytes()[:200])
    (fault,) = faults("imagenet", home, images=0)
    assert fault.verdict == "bad"
    assert fault.text.startswith(f"{path} cannot be decoded: ")
    assert faults("imagenet", home, images=2) == []  # the first and the last of each split
    label_map = next((write_cityscapes(tmp_path / "streets", others=OTHERS) / "gtFine" / "val").rglob("*.png"))
    label_map.write_bytes(b"none")
    (fault,) = faults("cityscapes", tmp_path / "streets")
    assert fault.text.startswith(f"{label_map} cannot be decoded: ")


def test_classes_that_no_label_map_has_are_named_if_all_are_read(tmp_path: Path) -> None:
    home = write_cityscapes(tmp_path, others=range(8, 33))
    for path in (home / "gtFine" / "val").rglob("*.png"):
        values = np.array(Image.open(path))
        values[values == 26] = 7
        values[values == 33] = 7
        Image.fromarray(values).save(path)
    assert faults("cityscapes", home) == [Finding("bad", "test: no pixel of class car, bicycle")]
    assert faults("cityscapes", home, images=1) == []  # others may have them
    colours = next((home / "gtFine" / "train").rglob("*.png"))
    paint(colours, 0, (64, 32))
    assert Finding("bad", f"{colours} is not a label map: it has colours") in faults("cityscapes", home)


def test_the_sets_of_torchvision_are_not_downloaded(tmp_path: Path) -> None:
    for name, place in (("mnist", tmp_path / "MNIST" / "raw"), ("svhn", tmp_path)):
        (fault,) = faults(name, tmp_path)
        assert fault.text.startswith(f"{name} is not in {place}")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = write_imagenet(tmp_path / "imagenet")
    assert main(["data", "check", "imagenet", str(home)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok  train: 12 images in 3 of 3 classes"
    assert all(line.startswith("ok ") for line in lines)
    (home / "val").rename(home / "test")
    assert main(["data", "check", "imagenet", str(home)]) == 1
    missing, licence, *sources = capsys.readouterr().out.splitlines()
    assert missing == f"bad {home / 'val'} is missing: a folder of validation images"
    assert licence.startswith("licence: non-commercial research")
    assert any("https://image-net.org/download.php" in source for source in sources)
    assert main(["data", "check", "imagnet", str(home)]) == 2
    assert "unknown data set 'imagnet'; did you mean 'imagenet'?" in capsys.readouterr().err
    paint(tmp_path / "own" / "train" / "a" / "1.png")
    assert main(["data", "check", "folder", str(tmp_path / "own")]) == 1
    assert "bad no image in" in capsys.readouterr().out
