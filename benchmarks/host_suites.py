"""Run the attention tests of PyTorch and of transformers with flashgen in place of their attention.

    python benchmarks/host_suites.py torch PYTORCH/test/test_transformers.py -k flash --count 500
    python benchmarks/host_suites.py torch PYTORCH/test/test_varlen_attention.py -k CUDA
    python benchmarks/host_suites.py transformers TRANSFORMERS/tests

The tests come with the sources of the libraries, of the version that is installed. They need pytest, those
of PyTorch also expecttest, those of transformers parameterized. ``torch`` activates flashgen in PyTorch's
registry of flash attention. ``transformers`` takes the tests that all models share, in
test_modeling_common.py, runs them on small decoders, and registers flashgen as ``sdpa``. Prints how many
tests ran and passed, and the reasons of the others, the most frequent first.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
import threading
import time
import types
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

# Of test_modeling_common.py: what has to do with attention.
ATTENTION_TESTS = (
    "fgen or sdpa or eager_matches or attention or training or outputs_equivalence or batching or determinism"
    " or sliding_window"
)
# Configurations of transformers, with what they need beside the sizes of all.
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
}
_SHOWN = 150  # characters of a reason
_GRACE_S = 2  # after the seconds that there are, for the test that runs then


class Outcomes:
    """A plugin of pytest that takes some of the tests, and counts their outcomes by reason."""

    def __init__(self, count: int | None, seconds: float | None, seed: int) -> None:
        self._count, self._seed = count, seed
        self._end = None if seconds is None else time.monotonic() + seconds
        self.selected = 0
        self.counts: Counter[str] = Counter()
        self.reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Take a random part of what -k leaves, in a random order: a limit of time leaves out no kind."""
        random.Random(self._seed).shuffle(session.items)
        if self._count is not None:
            del session.items[self._count :]
        self.selected = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the call of a test, or what kept it from being called."""
        if report.when != "call" and report.outcome == "passed":
            return
        if report.when == "teardown" and report.outcome == "failed":
            return  # counted already
        self.counts[report.outcome] += 1
        if report.outcome != "passed":
            self.reasons[report.outcome][_reason(report)].append(report.nodeid.rpartition("::")[2])

    def pytest_runtest_logfinish(self) -> None:
        """Stop after the seconds that there are."""
        if self._end is not None and time.monotonic() > self._end:
            raise pytest.exit.Exception("the seconds are over", returncode=0)

    def print_in_time(self) -> None:
        """Print what is known when the seconds are over, though a test may run much longer, and end."""
        if self._end is None:
            return
        out = os.dup(sys.stdout.fileno())  # pytest replaces the file of that number

        def stop() -> None:
            os.write(out, f"{self.table()}\n".encode())
            os._exit(0)

        timer = threading.Timer(self._end - time.monotonic() + _GRACE_S, stop)
        timer.daemon = True
        timer.start()

    def table(self) -> str:
        """What to print."""
        ran = self.counts["passed"] + self.counts["failed"]
        lines = [
            f"{ran} ran, {self.counts['passed']} passed, {self.counts['failed']} failed, "
            f"{self.counts['skipped']} skipped, of {self.selected}"
        ]
        for outcome, reasons in list(self.reasons.items()):  # the timer's thread reads while tests run
            for reason, tests in sorted(reasons.items(), key=lambda x: -len(x[1])):
                lines.append(f"{len(tests):5} {outcome}: {reason}  [{tests[0][:_SHOWN]}]")
        return "\n".join(lines)


def _reason(report: pytest.TestReport) -> str:
    """One line that tests which fail or are skipped for one reason share."""
    if isinstance(report.longrepr, tuple):  # of a test that is skipped
        return str(report.longrepr[2]).removeprefix("Skipped: ")[:_SHOWN]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr).strip().rpartition("\n")[2] if crash is None else crash.message
    lines = [x for x in text.splitlines() if x.strip()] or ["no message"]
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", lines[0])[:_SHOWN]


def torch_suite(path: Path, cpu: bool) -> list[str]:
    """Activate flashgen in PyTorch's registry; returns the arguments of pytest."""
    from torch.nn.attention import activate_flash_attention_impl

    from flashgen.compat.torch import register

    register(cpu=cpu)
    activate_flash_attention_impl("flashgen")
    sys.path.insert(0, str(path.parent))
    return [str(path)]


def transformers_suite(folder: Path, into: Path) -> list[str]:
    """Register flashgen, and write a module with the shared tests of `DECODERS`; returns the arguments of
    pytest.
    """
    from flashgen.compat.transformers import register

    register("sdpa")
    register()
    package = types.ModuleType("suite")
    package.__path__ = [str(folder)]
    sys.modules["suite"] = package
    # Mixins of other folders, without which an archive of the sources comes.
    for name, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        if (folder / f"{name.replace('.', '/')}.py").exists():
            continue
        parent, _, _ = name.partition(".")
        sys.modules[f"suite.{parent}"] = types.ModuleType(f"suite.{parent}")
        module = sys.modules[f"suite.{name}"] = types.ModuleType(f"suite.{name}")
        setattr(module, mixin, type(mixin, (), {}))
    path = into / "test_decoders.py"
    path.write_text(
        "import host_suites\n"
        "globals().update({x.__name__: x for x in map(host_suites.tests_of, host_suites.DECODERS)})\n",
        encoding="utf-8",
    )
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    return [str(path)]


class Tester:
    """A small decoder for the tests of all models: what they read of it, and a configuration with inputs."""

    batch_size, seq_length, is_training = 5, 12, True
    num_hidden_layers, num_attention_heads, hidden_size, vocab_size = 2, 4, 64, 99

    def __init__(self, name: str) -> None:
        self._name = name

    def get_config(self) -> Any:
        """A configuration of the decoder."""
        import transformers

        sizes = {
            name: getattr(self, name)
            for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
        }
        make = getattr(transformers, f"{self._name}Config")
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128}
        return make(**sizes, **DECODERS[self._name], pad_token_id=0, bos_token_id=1, eos_token_id=2)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """A configuration, and the arguments of a forward pass."""
        import torch
        from transformers.testing_utils import torch_device

        shape = self.batch_size, self.seq_length
        ids = torch.randint(3, self.vocab_size, shape, device=torch_device)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def tests_of(name: str) -> type:
    """The shared tests of a decoder of transformers, and those of its flash attention for flashgen."""
    import unittest

    import transformers
    from suite.test_modeling_common import ModelTesterMixin

    def set_up(self: Any) -> None:
        self.model_tester = Tester(name)

    def equivalence(side: str) -> Any:
        def test(self: Any) -> None:
            self.flash_attn_inference_equivalence(attn_implementation="fgen", padding_side=side)

        return test

    members = {
        "setUp": set_up,
        "all_model_classes": tuple(getattr(transformers, name + x) for x in ("Model", "ForCausalLM")),
        "test_fgen_inference_equivalence": equivalence("left"),
        "test_fgen_inference_equivalence_right_padding": equivalence("right"),
        "__module__": "test_decoders",
    }
    return type(f"{name}Test", (ModelTesterMixin, unittest.TestCase), members)


def main() -> None:
    """Run a suite, and print its outcomes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=("torch", "transformers"))
    parser.add_argument(
        "path", type=Path, help="test_transformers.py, or the folder of test_modeling_common.py"
    )
    parser.add_argument("-k", dest="filter", help="which tests, as for pytest")
    parser.add_argument("--count", type=int, help="take so many, at random")
    parser.add_argument("--seconds", type=float, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the order of tests")
    parser.add_argument("--cpu", action="store_true", help="torch: also serve tensors in host memory")
    options = parser.parse_args()
    path = options.path.resolve()
    if not path.exists():
        parser.error(f"{options.path} does not exist")
    with tempfile.TemporaryDirectory() as into:
        if options.suite == "torch":
            which, arguments = options.filter or "flash", torch_suite(path, options.cpu)
        else:
            which, arguments = options.filter or ATTENTION_TESTS, transformers_suite(path, Path(into))
        outcomes = Outcomes(options.count, options.seconds, options.seed)
        outcomes.print_in_time()
        quiet = [
            "-q",
            "--no-header",
            "--no-summary",
            "-p",
            "no:cacheprovider",
            "--capture=fd",
            "-c",
            "/dev/null",
        ]
        pytest.main([*quiet, "--rootdir", into, "-k", which, *arguments], plugins=[outcomes])
    print(outcomes.table())


if __name__ == "__main__":
    main()
