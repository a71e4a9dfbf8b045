"""First uses of specs by several threads at once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

_SCRIPT = """
    import sys, threading

    from flashgen.families.load import load_spec
    from flashgen.host.paths import specs_dir

    sys.setswitchinterval(1e-6)
    barrier, found = threading.Barrier(4), []

    def use():
        barrier.wait()
        try:
            found.append(load_spec(specs_dir() / "merge_sm80.yaml").content)
        except BaseException as error:
            found.append(error)

    several = [threading.Thread(target=use) for _ in range(4)]
    for each in several:
        each.start()
    for each in several:
        each.join()
    alone = load_spec(specs_dir() / "merge_sm80.yaml").content
    print([content for content in found if content != alone], len(found))
"""


def test_threads_that_check_a_spec_at_once():
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(_SCRIPT)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[] 4"), done.stderr
