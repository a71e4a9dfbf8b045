"""Timing flashgen beside its peers: named grids of shapes, one process, interleaved rounds, device events.

>>> from flashgen.tools.bench import run
>>> report = run(grid="prefill", dtypes=["fp16"], json_path="prefill.json", png_path="prefill.png")
"""

from flashgen.tools.bench.cases import Case
from flashgen.tools.bench.grids import GRIDS, Grid
from flashgen.tools.bench.results import Report
from flashgen.tools.bench.runner import run

__all__ = ["GRIDS", "Case", "Grid", "Report", "run"]
