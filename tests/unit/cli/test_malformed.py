"""500 damaged run files: each is valid or an error with text; never a traceback, never a fault of ours."""

from pathlib import Path

import pytest
from tests.support.malformed import malformed
from tests.support.run_files import DENSE, LATENT, MOE

from meshwright.cli.main import run

RECIPES = [file.read_text() for file in sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))]
TEXTS = [DENSE, MOE, LATENT, *RECIPES]
COUNT = 500


def test_damaged_run_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    codes: dict[int, int] = {}
    for seed in range(COUNT):
        text = malformed(TEXTS[seed % len(TEXTS)], seed)
        file = tmp_path / "run.yaml"
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        code = run(["check", str(file)])
        captured = capsys.readouterr()
        assert code in (0, 2), f"seed {seed}: exit {code}\n{captured.err}\n{text}"
        assert "Traceback" not in captured.err
        assert (code == 0) == bool(captured.out)
        assert (code == 2) == ("error: " in captured.err and "where: " in captured.err)
        codes[code] = codes.get(code, 0) + 1
    # A fuzz that always or never gets through tests nothing.
    assert codes[2] > COUNT // 2
    assert codes[0] > COUNT // 50


@pytest.mark.parametrize("seed", range(0, COUNT, 5))
def test_damaged_overrides(seed: int, capsys: pytest.CaptureFixture[str]):
    override = malformed("parallel.tp=2 optim.lr=1e-3\n", seed).strip()
    code = run(["check", "--", "demo", override])
    captured = capsys.readouterr()
    assert code in (0, 2), f"{override!r}: exit {code}\n{captured.err}"
