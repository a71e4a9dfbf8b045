from types import SimpleNamespace

import numpy as np
import pytest

from flashgen.errors import BadParam
from flashgen.runtime.streams import stream_pointer


@pytest.mark.parametrize(
    "stream",
    [
        7,
        np.int64(7),
        SimpleNamespace(ptr=7),
        SimpleNamespace(cuda_stream=7),
        type("Stream", (), {"__cuda_stream__": lambda self: (0, 7)})(),
    ],
)
def test_streams(stream):
    assert stream_pointer(stream) == 7


def test_what_is_no_stream():
    with pytest.raises(BadParam, match="stream is 'fast'"):
        stream_pointer("fast")
