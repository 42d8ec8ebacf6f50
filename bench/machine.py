"""Ceilings of this machine in one go: matmuls, attention, copies, and the profile that the planner reads.

    python -m bench.machine --out bench/results/machine_<device>_<date>

The same measurements as `meshwright bench gemm|attention|copy` and `meshwright hardware probe`, for machines
that have torch but not the packages of the command line.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.bench.attention import attention_rows
from meshwright.bench.copy import copy_rows
from meshwright.bench.gemm import layers, squares, vocabulary_sizes, width_sweep
from meshwright.bench.measurement import Measurement
from meshwright.bench.probe import probe
from meshwright.mesh import choose_device

log = partial(print, flush=True)
BENCHES = {
    "gemm": {"squares": squares, "layers": layers, "widths": width_sweep, "vocabulary": vocabulary_sizes},
    "attention": {"attention": attention_rows},
    "copy": {"copies": copy_rows},
}


def main() -> None:
    """Measure everything and write one folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--seconds", type=float, default=0.05, help="seconds that each measurement is repeated"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()
    device = choose_device(options.device, 0)
    for name, sections in BENCHES.items():
        with Measurement(name, device, log=log, as_json=False, output=options.out) as bench:
            for section, maker in sections.items():
                rows: Iterator[dict[str, Any]] = maker(device, seconds=options.seconds)
                bench.section(section, rows)
    profile = probe(device, seconds=options.seconds, log=log)
    (options.out / "machine.json").write_text(json.dumps(profile, indent=1) + "\n")


if __name__ == "__main__":
    main()
