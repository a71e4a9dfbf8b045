"""A bench for tuning whose times and faults the test sets, and a compiler that takes no time."""

from flashgen.toolchain.build import Built
from flashgen.toolchain.compile import Compiled
from flashgen.tools.bench.timing import Timing


class FakeBench:
    """``ms`` gives the time of a variant on a case. Tiles whose ``stages`` are in ``broken`` do not compile,
    those whose ``warps`` are in ``spilling`` spill. ``faults`` says by ``block_n`` what is wrong with a
    kernel, ``late`` by ``block_n`` and the name of a case. ``timed`` has the cases with their timed tiles.
    """

    def __init__(self):
        self.ms = lambda variant, case: 1.0
        self.broken, self.spilling = (), ()
        self.faults, self.late = {}, {}
        self.timed = []

    def build(self, pairs, jobs, on_done):
        """For ``build.build``."""
        results = []
        for variant, arch in pairs:
            tile = dict(variant.tile)
            spilled = 16 if tile["warps"] in self.spilling else 0
            made = Compiled(variant.name, arch, b"", "", 128, spilled, spilled, 0, 0, 0.1)
            error = "static_assert failed" if tile["stages"] in self.broken else ""
            results.append(Built(variant, arch, 0.1, compiled=None if error else made, error=error))
            on_done(results[-1])
        return results

    def arch(self, variant):
        return "sm_90"

    def wrong(self, variant):
        return self.faults.get(dict(variant.tile)["block_n"], "")

    def blocks_per_sm(self, variant):
        return 2

    def time(self, variants, case):
        self.timed.append((case.name, [dict(variant.tile) for variant in variants]))
        found = []
        for variant in variants:
            ms = self.ms(variant, case)
            fault = self.late.get((dict(variant.tile)["block_n"], case.name))
            found.append(fault or Timing(ms, ms, ms, rounds=3, calls=1))
        return found
