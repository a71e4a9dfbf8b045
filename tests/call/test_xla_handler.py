"""What XLA sees of flashgen: the structs of its foreign function interface, and the handlers, called here as
XLA calls them.
"""

from __future__ import annotations

import ctypes
import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import flashgen  # noqa: E402
from flashgen.call.record import AttentionCall, call_of  # noqa: E402
from flashgen.call.request import request_of  # noqa: E402
from flashgen.call.text import encode, with_shapes  # noqa: E402
from flashgen.call.xla import execution, handler, structs  # noqa: E402
from flashgen.runtime.numpykind import numpy_dtype  # noqa: E402

# Offsets and values in the headers of jaxlib releases, as `in_header` reads them.
RELEASES = json.loads((Path(__file__).parent.parent / "fixtures" / "xla_ffi.json").read_text())
# Names that changed between versions 0.3 and 0.4 of the interface.
RENAMED = {
    "XLA_FFI_Extension_Base": "XLA_FFI_InternalExtension",
    "error_message": ("XLA_FFI_Error_GetMessage", "XLA_FFI_Error_GetDetails"),
    "context_get": ("XLA_FFI_ExecutionContext_Get", "XLA_FFI_InvokeContext_Get"),
}
STRUCTS = {
    "XLA_FFI_Extension_Base": structs.Extension,
    "XLA_FFI_Api_Version": structs.Version,
    "XLA_FFI_Metadata": structs.Metadata,
    "XLA_FFI_Metadata_Extension": structs.MetadataExtension,
    "XLA_FFI_Error_Create_Args": structs.ErrorArguments,
    "XLA_FFI_Stream_Get_Args": structs.StreamArguments,
    "XLA_FFI_DeviceOrdinal_Get_Args": structs.OrdinalArguments,
    "XLA_FFI_Api": structs.Api,
    "XLA_FFI_ByteSpan": structs.ByteSpan,
    "XLA_FFI_Buffer": structs.Buffer,
    "XLA_FFI_Args": structs.Arguments,
    "XLA_FFI_Attrs": structs.Attributes,
    "XLA_FFI_CallFrame": structs.CallFrame,
}
VALUES = {
    "XLA_FFI_Extension_Metadata": structs.METADATA,
    "XLA_FFI_ExecutionStage_INITIALIZE": structs.INITIALIZE,
    "XLA_FFI_ExecutionStage_EXECUTE": structs.EXECUTE,
    "XLA_FFI_AttrType_STRING": structs.STRING,
    "XLA_FFI_Error_Code_INVALID_ARGUMENT": structs.INVALID_ARGUMENT,
    "XLA_FFI_Error_Code_INTERNAL": structs.INTERNAL,
    "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE": structs.COMMAND_BUFFER_COMPATIBLE,
}


def in_python():
    """The offset of each member of the structs, and the values of constants."""
    offsets = {f"{name}.{x}": getattr(s, x).offset for name, s in STRUCTS.items() for x, *_ in s._fields_}
    return offsets | VALUES


def in_header(folder, version, tmp_path):
    """The same by the header in a folder, as a compiler of C sees it."""
    newer = version != [0, 3]
    lines = []
    for name in in_python():
        struct, _, member = name.partition(".")
        struct = RENAMED.get(struct, struct) if newer else struct
        member = RENAMED[member][newer] if member in RENAMED else member
        value = f"offsetof({struct}, {member})" if member else struct
        lines.append(f'printf("%s %d\\n", "{name}", (int){value});')
    code = f"""#include <stdio.h>
#include "xla/ffi/api/c_api.h"
int main(void) {{ {" ".join(lines)} return 0; }}"""
    (tmp_path / "offsets.c").write_text(code)
    compiler = shutil.which("cc") or pytest.skip("there is no compiler of C")
    program = tmp_path / "offsets"
    subprocess.run([compiler, f"-I{folder}", tmp_path / "offsets.c", "-o", program], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(printed[::2], map(int, printed[1::2]), strict=True))


def test_the_structs_are_what_the_header_of_jaxlib_says(tmp_path):
    folder = jax.ffi.include_dir()
    version = structs.shipped_version(folder)
    assert version in structs.SUPPORTED
    assert in_header(folder, list(version), tmp_path) == in_python()


@pytest.mark.parametrize("release", RELEASES)
def test_the_structs_are_what_the_headers_of_releases_say(release):
    assert tuple(RELEASES[release]["version"]) in structs.SUPPORTED
    assert RELEASES[release]["header"] == in_python()


def test_a_folder_without_a_header_has_no_version(tmp_path):
    assert structs.shipped_version(str(tmp_path)) is None


class Xla:
    """Calls a handler as XLA does. ``errors`` has the messages and codes of the errors that it made."""

    def __init__(self, version=(0, 3), ordinal=0, stream=7):
        self.errors, self.ordinal, self.stream = [], ordinal, stream

        def create(arguments):
            self.errors.append((arguments.contents.message.decode(), arguments.contents.errc))
            return 1

        def stream_of(arguments):
            arguments.contents.stream = self.stream
            return

        def ordinal_of(arguments):
            arguments.contents.device_ordinal = self.ordinal
            return

        self.api = structs.Api(ctypes.sizeof(structs.Api), None)
        self.api.api_version.major_version, self.api.api_version.minor_version = version
        self.api.XLA_FFI_Error_Create = structs.ErrorCreate(create)
        self.api.XLA_FFI_Stream_Get = structs.StreamGet(stream_of)
        self.api.XLA_FFI_DeviceOrdinal_Get = structs.OrdinalGet(ordinal_of)

    def metadata(self, function):
        """The version and the traits that a handler reports."""
        metadata = structs.Metadata(ctypes.sizeof(structs.Metadata))
        extension = structs.MetadataExtension()
        extension.extension_base.type = structs.METADATA
        extension.metadata = ctypes.pointer(metadata)
        frame = structs.CallFrame(ctypes.sizeof(structs.CallFrame))
        frame.extension_start = ctypes.pointer(extension.extension_base)
        frame.api = ctypes.pointer(self.api)
        assert not function(ctypes.byref(frame))
        version = metadata.api_version
        return (version.major_version, version.minor_version), metadata.traits

    def call(self, function, text, inputs, outputs, stage=structs.EXECUTE):
        """Whether there was no error. ``inputs`` and ``outputs`` are (address, shape)."""
        kept = []

        def buffers(arguments):
            views = []
            for address, shape in arguments:
                dims = (ctypes.c_int64 * len(shape))(*shape)
                views.append(structs.Buffer(48, None, 0, address, len(shape), dims))
                kept.append(dims)
            pointers = (ctypes.c_void_p * len(views))(*(ctypes.addressof(x) for x in views))
            kept.extend((views, pointers))
            return structs.Arguments(
                40, None, len(views), None, ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
            )

        span = structs.ByteSpan(ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value, len(text))
        items = (ctypes.c_void_p * 1)(ctypes.addressof(span))
        frame = structs.CallFrame(ctypes.sizeof(structs.CallFrame), None, ctypes.pointer(self.api), 5, stage)
        frame.args, frame.rets = buffers(inputs), buffers(outputs)
        types = (ctypes.c_int * 1)(structs.STRING)
        frame.attrs.size, frame.attrs.types = 1, types
        frame.attrs.attrs = ctypes.cast(items, ctypes.POINTER(ctypes.c_void_p))
        return not function(ctypes.byref(frame))


def text_of(*, shapes, **values):
    """The text of a call of attention, whose arrays have these dtypes and shapes."""
    call = call_of(AttentionCall, **values)
    return with_shapes(encode(request_of(call), {}), shapes)


def described(arrays):
    return [(numpy_dtype(x.dtype), x.shape) for x in arrays]


@pytest.fixture
def qkv():
    random = np.random.default_rng(3)
    return [random.standard_normal((2, 17, 4, 32), np.float32) for _ in "qkv"]


@pytest.mark.parametrize("version", structs.SUPPORTED)
def test_metadata_answers_with_the_version_of_xla(version):
    assert Xla(version).metadata(handler.ON_HOST) == (version, 0)
    assert Xla(version).metadata(handler.ON_GPU) == (version, structs.COMMAND_BUFFER_COMPATIBLE)


def test_metadata_for_a_newer_xla_is_the_newest_version_here():
    assert Xla((0, 9)).metadata(handler.ON_HOST)[0] == structs.SUPPORTED[-1]


@pytest.mark.parametrize("version", structs.SUPPORTED)
def test_a_call_on_the_host_fills_all_of_its_poisoned_results(qkv, version):
    q, k, v = qkv
    text = text_of(q=q, k=k, v=v, causal=True, return_lse=True, shapes=described(qkv))
    out, lse = np.full(q.shape, np.nan, np.float32), np.full((2, 4, 17), np.nan, np.float32)
    where = [[(x.ctypes.data, x.shape) for x in arrays] for arrays in (qkv, (out, lse))]
    gc.collect()  # nothing but the module keeps the handler
    assert Xla(version).call(handler.ON_HOST, text, *where)
    expected = flashgen.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])


def test_an_error_is_one_of_xla_with_our_message(qkv):
    q, k, v = qkv
    lengths = np.array([3, 99], np.int32)
    arrays = (*qkv, lengths)
    text = text_of(q=q, k=k, v=v, kv_lengths=lengths, shapes=described(arrays))
    out = np.full(q.shape, np.nan, np.float32)
    xla = Xla()
    where = [[(x.ctypes.data, x.shape) for x in arguments] for arguments in (arrays, (out,))]
    assert not xla.call(handler.ON_HOST, text, *where)
    ((message, code),) = xla.errors
    assert message == "flashgen: BadParam: kv_lengths[1] is 99; expected 0 to 17, the capacity of k"
    assert code == structs.INVALID_ARGUMENT
    assert np.isnan(out).all()


def test_a_text_of_another_version_is_refused(qkv):
    q, k, v = qkv
    text = text_of(q=q, k=k, v=v, shapes=described(qkv)).replace(b'"version": 2', b'"version": 9')
    xla = Xla()
    assert not xla.call(handler.ON_HOST, text, [(0, (1,))] * 3, [(0, (1,))])
    assert "is of version 9; this flashgen reads version 2" in xla.errors[0][0]


def test_a_misaligned_array_is_an_error(qkv):
    q, k, v = qkv
    text = text_of(q=q, k=k, v=v, shapes=described(qkv))
    xla = Xla()
    assert not xla.call(handler.ON_HOST, text, [(4096 + 4, q.shape)] * 3, [(8192, q.shape)])
    assert "q starts at address 0x1004, which is not a multiple of 16" in xla.errors[0][0]


SHAPE = (2, 256, 4, 64)


def gpu_text(**options):
    fp16 = np.empty(SHAPE, np.float16)
    return text_of(q=fp16, k=fp16, v=fp16, shapes=[("fp16", SHAPE)] * 3, **options)


def addresses(count, start=1 << 40):
    return [start + place * (1 << 24) for place in range(count)]


@pytest.mark.parametrize("version", structs.SUPPORTED)
def test_a_call_on_a_gpu_loads_first_and_then_only_launches(fake_gpu, monkeypatch, version):
    from flashgen.runtime import kernel

    monkeypatch.setattr(execution, "_executions", {})
    text, xla = gpu_text(causal=True), Xla(version)
    q, k, v, out = addresses(4)
    where = [(x, SHAPE) for x in (q, k, v)], [(out, SHAPE)]
    assert xla.call(handler.ON_GPU, text, *where, stage=structs.INITIALIZE), xla.errors
    assert len(fake_gpu.variants) == 1
    assert not fake_gpu.launches
    monkeypatch.setattr(kernel, "load", lambda *_: pytest.fail("loaded again"))
    for _ in range(2):
        assert xla.call(handler.ON_GPU, text, *where), xla.errors
    assert [launch[2] for launch in fake_gpu.launches] == [7, 7]  # the stream
    members = fake_gpu.members()
    assert members["seqlen_kv"] == SHAPE[1]
    # A map of a tensor begins with its address.
    result = [int(np.frombuffer(members[name].tobytes(), np.uint64)[0]) for name in ("q", "k", "v", "out")]
    assert result == [q, k, v, out]


def test_a_workspace_is_a_result_and_is_aligned(fake_gpu, monkeypatch):
    monkeypatch.setattr(execution, "_executions", {})
    shapes = [("fp16", (1, 1, 4, 64)), *[("fp16", (1, 32768, 4, 64))] * 2]
    arrays = [np.empty(shape, np.float16) for _, shape in shapes]
    text = text_of(**dict(zip("qkv", arrays, strict=True)), shapes=shapes, splits=8)
    call = execution.execution(text, 0)
    size = call.workspace_bytes
    assert size == call.runner.workspace_bytes + execution.PADDING > execution.PADDING
    q, k, v, out, workspace = addresses(5)
    inputs = [(x, shape) for x, (_, shape) in zip((q, k, v), shapes, strict=True)]
    xla = Xla()
    results = [(out, shapes[0][1]), (workspace + 16, (size,))]
    assert xla.call(handler.ON_GPU, text, inputs, results), xla.errors
    words = np.frombuffer(fake_gpu.launches[0][3][: len(fake_gpu.launches[0][3]) // 8 * 8], np.uint64)
    assert any(workspace < word < workspace + size and not word % 256 for word in words)
    results[1] = (workspace, (size - execution.PADDING - 1,))
    assert not xla.call(handler.ON_GPU, text, inputs, results)
    assert "InsufficientWorkspace: the program has a workspace of" in xla.errors[-1][0]


def test_a_batch_without_entries_launches_nothing(fake_gpu, monkeypatch):
    monkeypatch.setattr(execution, "_executions", {})
    shape = (0, 8, 4, 64)
    x = np.empty(shape, np.float16)
    text = text_of(q=x, k=x, v=x, shapes=[("fp16", shape)] * 3)
    xla = Xla()
    for stage in (structs.INITIALIZE, structs.EXECUTE):
        assert xla.call(handler.ON_GPU, text, [(0, shape)] * 3, [(0, shape)], stage), xla.errors
    assert not fake_gpu.launches


def test_two_gpus_have_plans_of_their_own(fake_gpu, monkeypatch):
    monkeypatch.setattr(execution, "_executions", {})
    text = gpu_text()
    for ordinal in range(2):
        xla = Xla(ordinal=ordinal)
        where = [(x, SHAPE) for x in addresses(3)], [(1 << 44, SHAPE)]
        assert xla.call(handler.ON_GPU, text, *where), xla.errors
    assert {device for _, device in execution._executions} == {0, 1}
    assert len(fake_gpu.launches) == 2


@pytest.mark.parametrize("results", ["kept = call(x)", "call(x); call(x)"])
def test_a_process_ends_while_a_call_is_not_finished(results):
    """Python ends threads of XLA that are inside a call, which XLA then waits for."""
    program = f"""
import jax, flashgen
x = jax.random.normal(jax.random.key(0), (1, 700, 2, 32))
call = jax.jit(lambda x: flashgen.attention(x, x, x, causal=True))
{results}
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
