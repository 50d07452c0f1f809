"""Time of our methods and of the packages that implement the same, forward and backward, at the same sizes.

    python -m benchmarks.peers

Each pair has the same budget, heads and width, and the options with which both compute the same thing
(tests/peers/ shows that they do). A package whose attention takes q, k and v is given ours; one whose layer holds the
linear projections runs as it is, and our attention runs between those same projections.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.common import check_options, start
from skeinformer.checks import check_choice
from skeinformer.cli.measure import (
    Action,
    Sizes,
    action,
    peak_memory,
    quartile_fields,
    quartiles,
    random_inputs,
    ratio,
    threads,
    timed_rounds,
)
from skeinformer.cli.progress import Steps, show_steps
from skeinformer.cli.records import Ledger, Record, append, machine, now, read
from skeinformer.cli.specs import parse
from skeinformer.cli.tables import Table, count, label, seconds, size, spread, table_of

IDENTITY = ("kind", "method", "options", "peer", "n", "batch", "heads", "head_dim", "budget", "dtype", "threads")


@dataclass(frozen=True)
class Peers:
    """Time our methods and the packages that implement the same."""

    lengths: tuple[int, ...] = (4096,)
    """Sequence lengths, in tokens."""
    methods: tuple[str, ...] = ()
    """Names of ours. Default: all that have a peer."""
    batch: int = 4
    """Sequences in a batch."""
    heads: int = 2
    """Attention heads."""
    head_dim: int = 32
    """The head width p."""
    budget: int = 256
    """The sketch size d."""
    rounds: int = 7
    """Rounds in which both are timed."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""
    records: Path = Path("peers/records.jsonl")
    """File that records are appended to, one JSON line each."""

    def run(self, console: Console | None = None) -> None:
        """Measure what is missing in the records file, and print a table."""
        counts = dict.fromkeys(("lengths", "batch", "heads", "head_dim", "budget", "rounds"), 1)
        check_options(self, counts, ("lengths",))
        for method in self.methods:
            check_choice("method with a peer", method, dict.fromkeys(parse(peer.spec).method for peer in PEERS))
        console = console or Console(highlight=False)
        records = read(self.records, missing_ok=True)
        with threads(self.threads), show_steps(console) as steps:
            for record in peer_records(self, tuple(records), steps):
                append(self.records, record)
                records.append(record)
        peer_table(records).print(console)


class Pair(NamedTuple):
    """Both as functions without arguments: the output and its gradients."""

    ours: Action
    theirs: Action


class Peer(NamedTuple):
    """A package, the module to import from it, our contender that computes the same, and how to set up both.

    `make(module, ours, sizes, budget)`, with the imported module and our attention.
    """

    package: str
    module: str
    spec: str
    make: Callable[[Any, Any, Sizes, int], Pair]


def performer_pytorch(module: Any, ours: Any, sizes: Sizes, budget: int) -> Pair:
    """FastAttention takes q, k and v. Its features stay the same from call to call."""
    theirs = module.FastAttention(sizes.head_dim, nb_features=budget).to(sizes.device)
    inputs = random_inputs(sizes)
    return Pair(action(ours, inputs), action(theirs, inputs))


def reformer_pytorch(module: Any, ours: Any, sizes: Sizes, budget: int) -> Pair:
    """LSHAttention takes shared queries and keys, and batch and heads as one dimension."""
    theirs = module.LSHAttention(
        bucket_size=ours.method.chunk,
        n_hashes=ours.method.num_hashes,
        attend_across_buckets=ours.method.across_buckets,
        allow_duplicate_attention=ours.method.count_duplicates,
    ).eval()  # in training it would keep its buckets in a cache
    q, _, v = random_inputs(sizes)

    def attend(q: Tensor, v: Tensor) -> Tensor:
        output: Tensor = theirs(q.flatten(0, 1), v.flatten(0, 1))[0]
        return output.view(v.shape)

    attend(q, v)  # its own limits on the length are errors here
    return Pair(action(lambda q, v: ours(q, q, v), (q, v)), action(attend, (q, v)))


def nystrom_attention(module: Any, ours: Any, sizes: Sizes, budget: int) -> Pair:
    """A layer with one projection to q, k and v and one back; without its convolution, which ours is built without."""
    theirs = module.NystromAttention(
        width(sizes), dim_head=sizes.head_dim, heads=sizes.heads, num_landmarks=budget, residual=False
    ).to(sizes.device)

    def layer(x: Tensor) -> Tensor:
        q, k, v = (split(y, sizes) for y in theirs.to_qkv(x).chunk(3, -1))
        return theirs.to_out(merge(ours(q, k, v)))  # type: ignore[no-any-return]

    return layers(layer, theirs, ours, sizes)


def linformer(module: Any, ours: Any, sizes: Sizes, budget: int) -> Pair:
    """A layer with projections to q, k, v and back, and two learned combinations of tokens."""
    theirs = module.LinformerSelfAttention(width(sizes), seq_len=sizes.n, k=budget, heads=sizes.heads).to(sizes.device)

    def layer(x: Tensor) -> Tensor:
        q, k, v = (split(projection(x), sizes) for projection in (theirs.to_q, theirs.to_k, theirs.to_v))
        return theirs.to_out(merge(ours(q, k, v)))  # type: ignore[no-any-return]

    return layers(layer, theirs, ours, sizes)


def big_bird(module: Any, ours: Any, sizes: Sizes, budget: int) -> Pair:
    """transformers' self-attention with projections to q, k and v, in training: only there are blocks random."""
    config = module.BigBirdConfig(
        hidden_size=width(sizes),
        num_attention_heads=sizes.heads,
        block_size=ours.method.block,
        num_random_blocks=ours.method.num_random,
        max_position_embeddings=max(4096, sizes.n),
        attention_type="block_sparse",
        sep_token_id=None,
    )
    theirs = module.BigBirdBlockSparseAttention(config, seed=0).train().to(sizes.device)
    ones = torch.ones(sizes.batch, sizes.n, device=sizes.device)
    blocked, band, rows, columns = module.BigBirdModel.create_masks_for_block_sparse_attn(ones, ours.method.block)

    def layer(x: Tensor) -> Tensor:
        q, k, v = (split(projection(x), sizes) for projection in (theirs.query, theirs.key, theirs.value))
        return merge(ours(q, k, v))

    return layers(layer, theirs, ours, sizes, lambda x: theirs(x, band, rows, columns, blocked, blocked)[0])


PEERS = (
    Peer("performer-pytorch", "performer_pytorch", "performer:redraw=false", performer_pytorch),
    Peer("nystrom-attention", "nystrom_attention", "nystromformer", nystrom_attention),
    Peer("linformer", "linformer", "linformer:share_kv=false", linformer),
    Peer("reformer-pytorch", "reformer_pytorch", "reformer", reformer_pytorch),
    Peer(
        "reformer-pytorch", "reformer_pytorch", "reformer:across_buckets=true,count_duplicates=true", reformer_pytorch
    ),
    Peer("transformers", "transformers.models.big_bird.modeling_big_bird", "bigbird", big_bird),
)


def peer_records(options: Peers, present: Sequence[Record], steps: Steps) -> Iterator[Record]:
    """Yield records of kind "bench_peer": `ratio` is the peer's time over ours in the same round.

    A package that is not installed, or that cannot take these sizes, is left out.
    """
    done, started = Ledger(IDENTITY, present), now()
    for n, peer in ((n, peer) for n in options.lengths for peer in PEERS):
        sizes, spec = Sizes(n, options.batch, options.heads, options.head_dim), parse(peer.spec)
        steps(f"n = {n:,}: {spec.label} and {peer.package}")
        settings: Record = {"kind": "bench_peer", **spec.fields, "peer": peer.package, **sizes.fields}
        settings |= {"budget": options.budget, "threads": torch.get_num_threads(), "mode": "both"}
        if settings in done or (options.methods and spec.method not in options.methods):
            continue
        try:
            module = importlib.import_module(peer.module)
            ours = replace(spec, budget=options.budget).build(options.head_dim, n).train()
            pair = peer.make(module, ours, sizes, options.budget)
            peer_peak = peak_memory(pair.theirs)
        except (ModuleNotFoundError, AssertionError, RuntimeError, ValueError) as error:
            steps.print(f"Left out: {peer.package} at n = {n:,}: {' '.join(str(error).split())}")
            continue
        peak = peak_memory(pair.ours)
        times = timed_rounds(pair._asdict(), options.rounds)
        yield {
            **settings,
            **quartile_fields("seconds", quartiles(times["ours"])),
            **quartile_fields("peer_seconds", quartiles(times["theirs"])),
            **quartile_fields("ratio", ratio(times["theirs"], times["ours"])),
            "peak_bytes": peak,
            "peer_peak_bytes": peer_peak,
            "rounds": options.rounds,
            "started": started,
            **machine(),
        }


def peer_table(records: Sequence[Record]) -> Table:
    """Make a table with a row for each pair."""
    columns: dict[str, Callable[[Record], str]] = {
        "method": label,
        "n": lambda r: count(r.get("n")),
        "time": lambda r: seconds(r.get("seconds")),
        "peer": lambda r: str(r.get("peer")),
        "its time": lambda r: seconds(r.get("peer_seconds")),
        "its time / ours": lambda r: spread(r, "ratio"),
        "memory": lambda r: size(r.get("peak_bytes")),
        "its memory": lambda r: size(r.get("peer_peak_bytes")),
    }
    return table_of("", columns, [r for r in records if r.get("kind") == "bench_peer"])


def layers(
    layer: Callable[[Tensor], Tensor],
    theirs: Any,
    ours: Any,
    sizes: Sizes,
    call: Callable[[Tensor], Tensor] | None = None,
) -> Pair:
    """Our layer and theirs (`call`, or the module itself) on the same x, (b, n, h p), with the gradients of all."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes.batch, sizes.n, width(sizes), generator=generator).to(sizes.device).requires_grad_()
    parameters = (*theirs.parameters(), *ours.parameters())
    return Pair(action(layer, (x,), "both", parameters), action(call or theirs, (x,), "both", parameters))


def width(sizes: Sizes) -> int:
    """h p, the width of a layer."""
    return sizes.heads * sizes.head_dim


def split(x: Tensor, sizes: Sizes) -> Tensor:
    return x.reshape(sizes.batch, sizes.n, sizes.heads, sizes.head_dim).transpose(1, 2)  # (b, h, n, p)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # (b, n, h p)


if __name__ == "__main__":
    sys.exit(start(Peers))
