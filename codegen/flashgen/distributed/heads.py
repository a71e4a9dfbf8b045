"""Head shares: which query and kv heads each rank has after an exchange of heads (Ulysses)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from flashgen.errors import BadParam, arg


class HeadShares(NamedTuple):
    """``kv`` has the kv heads of each of the ``inner`` ranks, in the order of the rank's query heads.
    ``replicated`` is whether a kv head is on several ranks.
    """

    inner: int
    q_heads: int
    kv: tuple[tuple[int, ...], ...]
    replicated: bool

    @property
    def kv_heads(self) -> int:
        return len(self.kv[0])


@lru_cache(maxsize=64)
def head_shares(heads_q: int, heads_kv: int, inner: int) -> HeadShares:
    """Equal shares of the query heads, with the kv heads that these read. Where there are fewer kv heads than
    ranks, several ranks have the same one; where the groups of two kv heads meet within a rank, it has one kv
    head for each of its query heads. Raises BadParam if the ranks do not divide the query heads.
    """
    if heads_q % inner:
        raise BadParam(
            f"{arg('q')} has {heads_q} heads, which {inner} ranks cannot share equally, as "
            f"{arg('method')} 'ulysses' does; 'gather' can compute this call"
        )
    share, group = heads_q // inner, heads_q // heads_kv
    by_query = [[head // group for head in range(rank * share, (rank + 1) * share)] for rank in range(inner)]
    # A rank whose query heads are equally many of each of its kv heads needs each of these once.
    once = [sorted(set(heads)) for heads in by_query]
    regular = all(
        len(few) == len(once[0]) and all(heads.count(x) * len(few) == share for x in few)
        for heads, few in zip(by_query, once, strict=True)
    )
    kv = tuple(tuple(x) for x in (once if regular else by_query))
    return HeadShares(inner, share, kv, sum(map(len, kv)) > heads_kv)


def query_heads_of(kv_heads: slice, heads_q: int, heads_kv: int) -> slice:
    """The query heads that read some of a rank's kv heads."""
    group = heads_q // heads_kv
    return slice(kv_heads.start * group, min(kv_heads.stop, heads_kv) * group)
