"""Timing flashgen beside its peers: named grids of shapes, one process, interleaved rounds, device events.

>>> from flashgen.bench import run
>>> report = run(grid="prefill", dtypes=["fp16"], json_path="prefill.json", png_path="prefill.png")
"""

from flashgen.bench.cases import Case
from flashgen.bench.grids import GRIDS, Grid
from flashgen.bench.results import Report
from flashgen.bench.runner import run

__all__ = ["GRIDS", "Case", "Grid", "Report", "run"]
