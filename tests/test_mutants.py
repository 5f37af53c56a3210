"""What `make mutants` needs of the tree: the tests it names, and survivors whose lines are still there."""

import re

import pytest

from tests import mutants
from tests.helpers.checkout import ROOT

KNOWN = mutants.Known.read(mutants.SURVIVORS.read_text())


@pytest.mark.parametrize("named", sorted({name for names in mutants.ALSO_TESTED_BY.values() for name in names}))
def test_named_tests_exist(named: str) -> None:
    path, _, function = named.partition("::")
    assert (ROOT / path).exists()
    assert not function or re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize("room", sorted(mutants.ALSO_TESTED_BY))
def test_rooms_with_further_tests_exist(room: str) -> None:
    homes = [home for home in (ROOT / room, ROOT / "fedbn_flwr" / room) if home.is_dir()]
    assert len(homes) == 1
    file = next(homes[0].glob("*.py")).relative_to(ROOT)
    assert set(mutants.ALSO_TESTED_BY[room]) < set(mutants.tests_of(str(file)))


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in KNOWN.mutants}))
def test_lines_of_survivors_are_still_in_their_files(file: str) -> None:
    text = _joined((ROOT / file).read_text())
    gone = [mutant.before for mutant in KNOWN.mutants if mutant.file == file and _joined(mutant.before) not in text]
    assert gone == []


def _joined(text: str) -> str:
    return " ".join(text.split())
