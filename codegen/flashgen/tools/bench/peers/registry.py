"""Which peers there are and which of them a run takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.errors import BadParam, DeviceTypeNotSupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.tools.bench.peers.base import Peer

OURS = "flashgen"
# Flashgen by one algorithm each; timed only where a grid, or the user, names them.
LINEAGE = {f"{OURS}-{algorithm}": algorithm for algorithm in ("naive", "v1", "v2", "v3")}
# Flashgen on e4m3 codes of a case's arrays, by how it adds P V, and whether tokens of v are contiguous; timed
# where they are named.
FP8 = {
    f"{OURS}-fp8": ("promoted", False),
    f"{OURS}-fp8-fast": ("fast", False),
    f"{OURS}-fp8-vt": ("promoted", True),
}
# The fastest of the others; what counts in a cell is the best of those that take it.
RIVALS = ("torch-cudnn", "torch-varlen", "flash-attn-3", "flash-attn-4", "flex-attention", "cudnn-flex")

# The others that drop the scores that flashgen drops, with the same seed and offset.
DROPPING = ("torch-flash", "flash-attn-2")


def all_peers() -> dict[str, Peer]:
    """Every known peer by name, flashgen first; none of them has imported its library yet."""
    from flashgen.tools.bench.peers.cudnn_flex import CudnnFlex
    from flashgen.tools.bench.peers.flash_attn import FlashAttn
    from flashgen.tools.bench.peers.flash_attn4 import FlashAttn4
    from flashgen.tools.bench.peers.flashinfer import FlashInfer, FlashInferDecode
    from flashgen.tools.bench.peers.flex_attention import FlexAttention
    from flashgen.tools.bench.peers.own import Flashgen, FlashgenFixed, FlashgenFp8, FlashgenKept
    from flashgen.tools.bench.peers.torch_sdpa import TorchSdpa
    from flashgen.tools.bench.peers.torch_varlen import TorchVarlen

    peers: list[Peer] = [
        Flashgen(),
        Flashgen(grouping="gqa"),
        Flashgen(grouping="packed"),
        FlashgenFixed(),
        FlashgenKept(),
        Flashgen(target="sm80"),
        TorchSdpa("flash"),
        TorchSdpa("cudnn"),
        TorchSdpa("efficient"),
        TorchVarlen(),
        FlashAttn(2),
        FlashAttn(3),
        FlashAttn4(),
        FlashInfer("fa2"),
        FlashInfer("fa3"),
        FlashInferDecode(),
        FlexAttention(),
        CudnnFlex(),
        *(Flashgen(algorithm=algorithm) for algorithm in LINEAGE.values()),
        *(FlashgenFp8(name, *of_codes) for name, of_codes in FP8.items()),
    ]
    return {peer.name: peer for peer in peers}


def choose_peers(names: Sequence[str] | None, needed: bool = True) -> tuple[list[Peer], dict[str, str]]:
    """The peers to run, flashgen first, and why each of the others is left out.

    With no names, all that can be used here but LINEAGE and FP8. Raises BadParam for an unknown name, or one
    that cannot be used where all are ``needed``, and DeviceTypeNotSupported where flashgen itself cannot.
    """
    peers = all_peers()
    unknown = [name for name in names or () if name not in peers]
    if unknown:
        raise BadParam(f"there is no peer {', '.join(unknown)}; peers: {', '.join(peers)}")
    chosen: list[Peer] = []
    left_out: dict[str, str] = {}
    for name, peer in peers.items():
        if name != OURS and (name in {*LINEAGE, *FP8} if names is None else name not in names):
            continue
        reason = peer.unavailable()
        if reason is None:
            chosen.append(peer)
        elif name == OURS:
            raise DeviceTypeNotSupported(f"flashgen cannot be timed here: {reason}")
        elif names is not None and needed:
            raise BadParam(f"peer {name!r} cannot be used here: {reason}")
        else:
            left_out[name] = reason
    return chosen, left_out
