"""The masks by a line that are timed: what each peer is told is what the mask shows."""

import numpy as np
import pytest

from flashgen import Mask
from flashgen.operators.visibility import visibility_on_host
from flashgen.tools.bench.lines import LINES, line_of


@pytest.mark.parametrize("name", LINES)
def test_all_forms_of_a_mask_hide_the_same_keys(name):
    line, length = line_of(name, 3072), 3072
    text, params = line.of_mask(name)
    mask, at = Mask(text, **params), np.arange(length)
    sizes = {"batch": 1, "num_heads_q": 1, "seqlen_q": length, "seqlen_kv": length}
    visibility = visibility_on_host(mask.rule, mask.arrays, sizes)
    hidden = np.broadcast_to(visibility.hides(0, 0, at[:, None], at), (length, length))
    np.testing.assert_array_equal(line.hidden(), hidden)
    assert line.pairs == hidden.size - np.count_nonzero(hidden)
    # As cuDNN has it: [0, F0), then [F1, F2), and so on.
    ends = line.endpoints()[:, :, None]
    seen = at < ends[0]
    for begin, end in zip(ends[1::2], ends[2::2], strict=True):
        seen = seen | ((begin <= at) & (at < end))
    np.testing.assert_array_equal(~seen, hidden)


@pytest.mark.parametrize("name", LINES)
def test_flex_attention_has_the_rule_of_the_mask(name):
    torch = pytest.importorskip("torch")
    from flashgen.tools.bench.peers.flex_attention import _of_line

    line, at = line_of(name, 3072), torch.arange(3072)
    text, params = line.of_mask(name)
    params = {key: torch.from_numpy(x) if hasattr(x, "shape") else x for key, x in params.items()}
    visible = _of_line(name, Mask(text, **params))(0, 0, at[:, None], at)
    np.testing.assert_array_equal(visible.numpy(), ~line.hidden())
