"""The implementations that are timed, one module per family; all of them behind `Peer`."""

from flashgen.bench.peers.base import Peer, Run
from flashgen.bench.peers.registry import all_peers, choose_peers

__all__ = ["Peer", "Run", "all_peers", "choose_peers"]
