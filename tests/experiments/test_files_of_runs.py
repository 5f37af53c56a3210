"""By what a run is known again: the files that its options name."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from fedbn_flwr.data.sets import mnist
from fedbn_flwr.data.sets.listing import list_below
from fedbn_flwr.experiments import experiment
from tests.helpers.image_sets import WRITERS


@pytest.mark.parametrize("name", WRITERS)
def test_a_data_set_in_files_counts_by_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they lie, and whatever is hidden among them."""
    WRITERS[name](tmp_path / "one")
    other = WRITERS[name](tmp_path / "other")
    (other / ".DS_Store").touch()

    def digests(root: str) -> dict[str, str]:
        experiment.look_again()
        options = {"dataset": name, "data-root": str(tmp_path / root), "partition": "iid"}
        return experiment.resolve(options).files

    assert digests("one").keys() == {"dataset"}
    assert digests("one") == digests("other")
    assert digests("nowhere") == {}
    # an earlier run of the process may have looked elsewhere
    monkeypatch.setenv("FEDBN_FLWR_DATA", str(tmp_path / "nowhere"))
    assert experiment.resolve({"dataset": name, "partition": "iid"}).files == {}
    monkeypatch.setenv("FEDBN_FLWR_DATA", str(tmp_path / "one"))
    assert experiment.resolve({"dataset": name, "partition": "iid"}).files == digests("one")
    largest = max((tmp_path / "one").rglob("*.*"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert digests("one") != digests("other")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "fashion-domains"])
def test_own_files_in_the_form_of_mnist_count(name: str, tmp_path: Path) -> None:
    """Nothing but these files: results may lie beside them."""

    def digests() -> dict[str, str]:
        experiment.look_again()
        return experiment.resolve({"dataset": f"{name}:{tmp_path}", "partition": "iid"}).files

    assert digests() == {}
    for file in mnist.NAMES:
        (tmp_path / f"{file}.gz").write_bytes(bytes(100))
    first = digests()
    assert first.keys() == {"dataset"}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "summary.json").touch()
    assert digests() == first
    (tmp_path / f"{mnist.NAMES[1]}.gz").write_bytes(bytes(99) + b"1")
    assert digests() != first


def test_of_many_files_a_sample_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle of some, and the names and sizes of all."""
    monkeypatch.setattr(experiment, "FILES_READ", 4)
    monkeypatch.setattr(experiment, "BYTES_READ", 40)
    names = [f"{number}.bin" for number in range(8)]
    for name in names:
        (tmp_path / name).write_bytes(bytes(100))

    def changes(number: int, place: int, size: int = 100) -> bool:
        before = experiment._digest_files(list_below(tmp_path))
        content = bytearray(size)
        content[place] = 1
        (tmp_path / names[number]).write_bytes(content)
        after = experiment._digest_files(list_below(tmp_path))
        (tmp_path / names[number]).write_bytes(bytes(100))
        return before != after

    assert [changes(number, 50) for number in range(4)] == [True, False, True, False]
    assert [changes(2, place) for place in (44, 45, 54, 55)] == [False, True, True, False]
    assert changes(1, 0, size=101)


def test_a_link_to_a_folder_around_it_brings_no_file_twice(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.bin").touch()
    (tmp_path / "images" / "all").symlink_to(tmp_path)
    assert list_below(tmp_path).names == ["images/1.bin"]


def test_a_file_that_cannot_be_read_counts_by_its_size(tmp_path: Path) -> None:
    """Whether it is needed, nobody knows yet."""
    for name in ("1.bin", "2.bin"):
        (tmp_path / name).write_bytes(bytes(100))
    before = experiment._digest_files(list_below(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.open", Mock(side_effect=PermissionError))
        unread = experiment._digest_files(list_below(tmp_path))
        (tmp_path / "1.bin").rename(tmp_path / "3.bin")
        renamed = experiment._digest_files(list_below(tmp_path))
    assert len({before, unread, renamed}) == 3
