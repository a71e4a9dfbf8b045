"""One pool of gloo processes for all tests of the folder that need one."""

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    pytest.importorskip("torch")
    processes = Pool(tmp_path_factory.mktemp("gloo"))
    yield processes
    processes.close()
