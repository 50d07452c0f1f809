"""Time of our methods beside the packages that implement the same, forward and backward, at the same sizes.

Each pair has the same budget, heads and width, and the options with which both compute the same thing
(tests/peers/ shows that they do). A package whose attention takes q, k and v is given ours; one whose layer holds the
linear projections runs as it is, and our attention runs between those same projections.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skeinformer.checks import check_choice, check_count
from skeinformer.comparison.measure import quartiles, ratio
from skeinformer.lab.contender import Contender, build_contender, parse
from skeinformer.lab.measure.memory import peak_memory
from skeinformer.lab.measure.speed import (
    IDENTITY,
    Action,
    InputSizes,
    both_run,
    quartile_fields,
    random_inputs,
    timed_rounds,
)
from skeinformer.lab.records import Ledger, Record, machine
from skeinformer.lab.work import OnSkip, OnStep, now, silent


class BesidePeer(NamedTuple):
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
    make: Callable[[Any, Any, InputSizes, int], BesidePeer]


def performer_pytorch(module: Any, ours: Any, sizes: InputSizes, budget: int) -> BesidePeer:
    """FastAttention takes q, k and v. Its features stay the same from call to call."""
    theirs = module.FastAttention(sizes.head_dim, nb_features=budget).to(sizes.device)
    inputs = random_inputs(sizes)
    return BesidePeer(both_run(ours, inputs), both_run(theirs, inputs))


def reformer_pytorch(module: Any, ours: Any, sizes: InputSizes, budget: int) -> BesidePeer:
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
    return BesidePeer(both_run(lambda q, v: ours(q, q, v), (q, v)), both_run(attend, (q, v)))


def nystrom_attention(module: Any, ours: Any, sizes: InputSizes, budget: int) -> BesidePeer:
    """A layer with one projection to q, k and v and one back; without its convolution, which ours is built without."""
    theirs = module.NystromAttention(
        width(sizes), dim_head=sizes.head_dim, heads=sizes.heads, num_landmarks=budget, residual=False
    ).to(sizes.device)

    def layer(x: Tensor) -> Tensor:
        q, k, v = (split(y, sizes) for y in theirs.to_qkv(x).chunk(3, -1))
        return theirs.to_out(merge(ours(q, k, v)))  # type: ignore[no-any-return]

    return layers(layer, theirs, ours, sizes)


def linformer(module: Any, ours: Any, sizes: InputSizes, budget: int) -> BesidePeer:
    """A layer with projections to q, k, v and back, and two learned combinations of tokens."""
    theirs = module.LinformerSelfAttention(width(sizes), seq_len=sizes.n, k=budget, heads=sizes.heads).to(sizes.device)

    def layer(x: Tensor) -> Tensor:
        q, k, v = (split(projection(x), sizes) for projection in (theirs.to_q, theirs.to_k, theirs.to_v))
        return theirs.to_out(merge(ours(q, k, v)))  # type: ignore[no-any-return]

    return layers(layer, theirs, ours, sizes)


def big_bird(module: Any, ours: Any, sizes: InputSizes, budget: int) -> BesidePeer:
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


def peer_records(
    n: int = 4096,
    *,
    methods: Sequence[str] = (),
    batch: int = 4,
    heads: int = 2,
    head_dim: int = 32,
    budget: int = 256,
    rounds: int = 7,
    device: str = "cpu",
    known: Sequence[Record] = (),
    peers: Sequence[Peer] = PEERS,
    on_step: OnStep = silent,
    on_skip: OnSkip = lambda what, reason: None,
) -> Iterator[Record]:
    """Records of kind "bench_peer", a pair at a time: `ratio` is the peer's time over ours in the same round.

    `methods` are names of ours, all that have a peer by default. A package that is not installed, or that cannot take
    these sizes, is skipped, and `on_skip(what, reason)` told. What is in `known` is not measured again.
    """
    for name, count in (("length", n), ("batch", batch), ("heads", heads), ("head_dim", head_dim), ("rounds", rounds)):
        check_count(name, count)
    for method in methods:
        check_choice("method with a peer", method, dict.fromkeys(parse(peer.spec).method for peer in peers))
    started = now()
    present = Ledger(IDENTITY, known)
    sizes = InputSizes(n, batch, heads, head_dim, device=device)
    for index, peer in enumerate(peers):
        contender = parse(peer.spec)
        settings = _settings(peer, contender, sizes, budget)
        if settings in present or (methods and contender.method not in methods):
            continue
        on_step(f"n = {n:,}: {contender.label} beside {peer.package}", index / len(peers))
        try:
            module = importlib.import_module(peer.module)
        except ModuleNotFoundError as error:
            on_skip(peer.package, f"it needs {error.name}, which is not installed")
            continue
        ours = build_contender(contender, head_dim=head_dim, max_len=n, budget=budget).train().to(device)
        try:
            pair = peer.make(module, ours, sizes, budget)
            peer_peak = peak_memory(pair.theirs, device)
        except (AssertionError, RuntimeError, ValueError) as error:
            on_skip(peer.package, f"it cannot take n = {n:,} with a budget of {budget}: {error}")
            continue
        peak = peak_memory(pair.ours, device)
        seconds = timed_rounds(pair._asdict(), rounds)
        yield {
            **settings,
            **quartile_fields("seconds", quartiles(seconds["ours"])),
            **quartile_fields("peer_seconds", quartiles(seconds["theirs"])),
            **quartile_fields("ratio", ratio(seconds["theirs"], seconds["ours"])),
            "peak_bytes": peak,
            "peer_peak_bytes": peer_peak,
            "rounds": rounds,
            "started": started,
            **machine(),
        }


def layers(
    layer: Callable[[Tensor], Tensor],
    theirs: Any,
    ours: Any,
    sizes: InputSizes,
    call: Callable[[Tensor], Tensor] | None = None,
) -> BesidePeer:
    """Our layer and theirs (`call`, or the module itself) on the same x, (b, n, h p), with the gradients of all."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes.batch, sizes.n, width(sizes), generator=generator).to(sizes.device).requires_grad_()
    parameters = (*theirs.parameters(), *ours.parameters())
    return BesidePeer(both_run(layer, (x,), parameters), both_run(call or theirs, (x,), parameters))


def width(sizes: InputSizes) -> int:
    """h p, the width of a layer."""
    return sizes.heads * sizes.head_dim


def split(x: Tensor, sizes: InputSizes) -> Tensor:
    return x.reshape(sizes.batch, sizes.n, sizes.heads, sizes.head_dim).transpose(1, 2)  # (b, h, n, p)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # (b, n, h p)


def _settings(peer: Peer, contender: Contender, sizes: InputSizes, budget: int) -> Record:
    return {
        "kind": "bench_peer",
        "method": contender.method,
        "options": contender.options_text,
        "label": contender.label,
        "peer": peer.package,
        **sizes.fields,
        "budget": budget,
        "threads": torch.get_num_threads(),
        "mode": "both",
    }
