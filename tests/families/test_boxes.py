from pathlib import Path

import pytest

from flashgen.errors import SpecError
from flashgen.families.load import load_spec
from flashgen.families.params import Box

TMA = Path(__file__).parents[1] / "fixtures" / "tma" / "specs" / "copy_tma.yaml"
ROWS, K_BOX = "rows: block_m\n", "box: {columns: 16, rows: block_n}"


def boxes(variant):
    return {param.name: param.box for param in variant.params if param.box}


def test_a_box_follows_point_and_tile():
    spec = load_spec(TMA)
    by_axes = {(v.head_dim, v.gqa): boxes(v) for v in spec.select(dtype="fp16", mask_type="none")}
    assert by_axes[64, "mha"] == {"q": Box(64, 128), "k": Box(16, 64)}
    assert by_axes[96, "gqa"] == {"q": Box(32, 192), "k": Box(16, 80)}
    assert by_axes[16, "packed"] == {"q": Box(16, 128)}
    assert all(
        (param.ctype == "tensor_map") == (param.box is not None)
        for v in spec.variants()
        for param in v.params
    )


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (ROWS, "rows: block_q\n", 32, r"params\[0\].box.rows: unknown name 'block_q'"),
        (ROWS, "rows: 3 * block_m\n", 32, r"params\[0\].box.rows: 384 rows for .*; allowed: 1 to 256"),
        (ROWS, "rows: 0\n", 32, r"box.rows: 0 rows for head_dim=16"),
        ("else 32 if", "else 48 if", 31, r"params\[0\].box.columns: 48 columns are 96 bytes.*32, 64, 128"),
        ("else 32 if", "else 1 // 0 if", 31, "box.columns: head_dim=96 .* cannot be computed"),
        (K_BOX, "box: {columns: 16, row: 8}", 33, r"params\[1\].box.row: unknown key; .*columns, rows"),
        (K_BOX, "box: {columns: 16}", 33, "the key `rows` is missing"),
        (f", {K_BOX}", "", 33, r"params\[1\]: the key `box`"),
        ("type: element*}", f"type: element*, {K_BOX}}}", 34, r"params\[2\].box: only a tensor_map"),
    ],
)
def test_a_wrong_box_names_line_and_key(tmp_path, old, new, line, message):
    text = TMA.read_text()
    assert text.count(old) == 1
    path = tmp_path / "copy_tma.yaml"
    path.write_text(text.replace(old, new))
    with pytest.raises(SpecError, match=rf"copy_tma.yaml:{line}: .*{message}"):
        load_spec(path)
