"""The implementations that are timed, one module per family; all of them are a `Peer`."""

from flashgen.tools.bench.peers.base import Peer, Run
from flashgen.tools.bench.peers.registry import all_peers, choose_peers

__all__ = ["Peer", "Run", "all_peers", "choose_peers"]
