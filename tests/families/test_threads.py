"""First uses of specs by several threads at once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

_SCRIPT = """
    import sys, threading
    from pathlib import Path

    import msgspec

    from flashgen.families.schema import Name
    from flashgen.families.yamlfile import Document

    sys.setswitchinterval(1e-6)
    document = Document(Path("x.yaml"), b"a: 1")

    def new_type(i):
        # Annotations of types within types are read by Python code, in which threads switch.
        inner = [msgspec.defstruct(f"Inner{i}_{n}", [("x", list[Name])]) for n in range(10)]
        return msgspec.defstruct(f"Outer{i}", [(f"f{n}", each | None, None) for n, each in enumerate(inner)])

    wrong, types = [], [new_type(i) for i in range(100)]
    for type in types:
        barrier = threading.Barrier(4)

        def use():
            barrier.wait()
            try:
                made = document.convert((), {"f3": {"x": ["a"]}, "f9": {"x": ["d", "e"]}}, type)
                if made.f9.x != ["d", "e"]:
                    wrong.append(made)
            except BaseException as error:
                wrong.append(error)

        several = [threading.Thread(target=use) for _ in range(4)]
        for each in several:
            each.start()
        for each in several:
            each.join()
    print(wrong)
"""


def test_threads_that_prepare_a_type_at_once():
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(_SCRIPT)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
