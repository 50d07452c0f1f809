"""Our methods timed beside the packages that implement them, at small sizes."""

from typing import Any

import pytest
import torch

from skeinformer.lab.contender import build_contender, parse
from skeinformer.lab.measure.peers import PEERS, Peer, peer_records, performer_pytorch
from skeinformer.lab.measure.speed import InputSizes
from skeinformer.lab.records import check

TINY: dict[str, Any] = {"batch": 2, "heads": 2, "head_dim": 8, "budget": 16, "rounds": 2}


@pytest.mark.peers
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.package}-{peer.spec}")
def test_a_pair(peer: Peer) -> None:
    pytest.importorskip(peer.module, reason=f"{peer.package} is not installed")
    (row,) = peer_records(256, peers=[peer], **TINY)
    check(row)
    contender = parse(peer.spec)
    assert (row["kind"], row["method"], row["peer"]) == ("bench_peer", contender.method, peer.package)
    assert (row["n"], row["budget"], row["options"]) == (256, 16, contender.options_text)
    for name in ("seconds", "peer_seconds", "ratio"):
        low, middle, high = (float(row[f"{name}{end}"] or 0) for end in ("_q25", "", "_q75"))
        assert 0 < low <= middle <= high
    assert list(peer_records(256, peers=[peer], known=[row], **TINY)) == []


@pytest.mark.peers
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.package}-{peer.spec}")
def test_both_of_a_pair_give_the_gradients_of_the_same_tensors(peer: Peer) -> None:
    module = pytest.importorskip(peer.module, reason=f"{peer.package} is not installed")
    ours = build_contender(parse(peer.spec), head_dim=8, max_len=256, budget=16).train()
    pair = peer.make(module, ours, InputSizes(256, 2, 2, 8), 16)
    first: Any = pair.ours()
    second: Any = pair.theirs()
    assert len(first) == len(second)
    assert first[0].shape == second[0].shape
    assert all(g.isfinite().all() for g in (*first, *second) if g is not None)
    shared = sum(p.numel() for p in ours.parameters())  # one side has the peer's, one ours, of the same sizes
    sizes = [sum(g.numel() for g in gradients if g is not None) for gradients in (first, second)]
    assert sizes[0] == sizes[1]
    assert shared <= sizes[0]


@pytest.mark.peers
def test_with_the_same_weights_the_layers_agree() -> None:
    """Our attention runs between the peer's own projections: the gradient of x is theirs."""
    package = pytest.importorskip("linformer")
    (peer,) = [peer for peer in PEERS if peer.package == "linformer"]
    ours: Any = build_contender(parse(peer.spec), head_dim=8, max_len=64, budget=16)
    made: list[Any] = []

    class Recorded(package.LinformerSelfAttention):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    class Module:
        LinformerSelfAttention = Recorded

    pair = peer.make(Module, ours, InputSizes(64, 2, 2, 8), 16)
    with torch.no_grad():
        ours.key_projection.copy_(made[0].proj_k)
        ours.value_projection.copy_(made[0].proj_v)
    first: Any = pair.ours()
    second: Any = pair.theirs()
    torch.testing.assert_close(first[0], second[0], rtol=1e-4, atol=1e-4)


def test_a_missing_package_is_named_and_skipped() -> None:
    skipped: list[tuple[str, str]] = []
    peer = Peer("no-such-package", "no_such_package", "performer", performer_pytorch)
    assert list(peer_records(64, peers=[peer], **TINY, on_skip=lambda *skip: skipped.append(skip))) == []
    assert skipped == [("no-such-package", "it needs no_such_package, which is not installed")]


@pytest.mark.peers
def test_a_length_that_a_package_cannot_take_is_skipped_with_its_reason() -> None:
    pytest.importorskip("reformer_pytorch")
    skipped: list[tuple[str, str]] = []
    options = {**TINY, "methods": ["reformer"], "on_skip": lambda *skip: skipped.append(skip)}
    assert list(peer_records(250, **options)) == []
    assert {what for what, _ in skipped} == {"reformer-pytorch"}
    assert "it cannot take n = 250" in skipped[0][1]


def test_methods_without_a_peer_are_an_error() -> None:
    with pytest.raises(ValueError, match="vmean"):
        next(peer_records(64, methods=["vmean"], **TINY))
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        next(peer_records(64, **{**TINY, "rounds": 0}))


def test_every_peer_names_a_method_and_its_options() -> None:
    assert {parse(peer.spec).method for peer in PEERS} == {
        "performer",
        "nystromformer",
        "linformer",
        "reformer",
        "bigbird",
    }
