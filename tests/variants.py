"""Variants for tests of scheduling, without a spec."""

from flashgen.families.dispatch import Dispatch
from flashgen.families.grid import Grid, Visits
from flashgen.families.variant import Variant


def variant(head_dim=64, dtype="fp16", mask_type="none", gqa="mha", **changes):
    tile = {"block_m": changes.pop("block_m", 128), "min_blocks": changes.pop("min_blocks", 2)}
    fields = {
        "family": "flash_fwd",
        "spec": "flash_fwd_sm80",
        "template": "flash_fwd_sm80.cu.j2",
        "target": "sm80",
        "min_arch": "sm_80",
        "archs": ("sm_80",),
        "max_smem": changes.get("smem_bytes", 65536),
        "axes": (("head_dim", head_dim), ("dtype", dtype), ("mask_type", mask_type), ("gqa", gqa)),
        "tile": tuple(tile.items()),
        "grid": Grid(
            (("query_rows", tile["block_m"]), ("heads", 1), ("batch", 1)), blocks_per_sm=tile["min_blocks"]
        ),
        "visits": Visits(tile["block_m"], 1, 16, 1),
        "tile_name": "",
        "threads": 128,
        "smem_bytes": 65536,
        "element_bytes": 2,
        "params": (),
        "header": "flashgen/sm80.cuh",
    }
    numbers = {name: changes.pop(name) for name in Dispatch._fields if name in changes}
    return Variant(**(fields | {"dispatch": Dispatch(**numbers)} | changes))
