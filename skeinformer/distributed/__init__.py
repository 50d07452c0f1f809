"""One sequence over several processes: shares of its tokens, and what has to be reduced over them.

    from skeinformer import cluster_attention
    from skeinformer.distributed import gather, shard

    q, k, v = (shard(x, group=group, dim=2) for x in (query, key, value))       # (batch, heads, tokens, width)
    output = gather(cluster_attention(q, k, v, budget=64, group=group), group, dim=2)

Every rank passes its share to an attention with `group=`, and the result is that of one process: docs/distributed.md.
"""

from skeinformer.distributed.group import Group
from skeinformer.distributed.shares import (
    all_sum,
    average_gradients,
    gather,
    mean_over_tokens,
    shard,
    share_lengths,
    token_at,
)
from skeinformer.distributed.world import Exchange, RankError, watch

__all__ = [
    "Exchange",
    "Group",
    "RankError",
    "all_sum",
    "average_gradients",
    "gather",
    "mean_over_tokens",
    "shard",
    "share_lengths",
    "token_at",
    "watch",
]
