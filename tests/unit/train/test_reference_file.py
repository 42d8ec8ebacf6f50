"""Log-probs on disk: table and facts belong together whenever a write is cut off."""

from pathlib import Path

import numpy as np
import pytest

from meshwright.train.reference_file import read_table, write_table

NAMES = ("table.npy", "facts.json")


@pytest.mark.parametrize("num_moves", [0, 1, 2])
def test_facts_never_stand_beside_the_table_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_moves: int
):
    write_table(tmp_path, NAMES, np.zeros((3, 2)), {"weights": 0})
    move, left = Path.replace, [num_moves]

    def cut_off(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return move(path, target)

    monkeypatch.setattr(Path, "replace", cut_off)
    if num_moves < len(NAMES):
        with pytest.raises(KeyboardInterrupt):
            write_table(tmp_path, NAMES, np.ones((3, 2)), {"weights": 1})
        with pytest.raises(FileNotFoundError):
            read_table(tmp_path, NAMES)
    else:
        write_table(tmp_path, NAMES, np.ones((3, 2)), {"weights": 1})
        facts, table = read_table(tmp_path, NAMES)
        assert facts == {"weights": 1} and (table == 1).all()
