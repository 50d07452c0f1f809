"""`skeinformer.sketched`: every call of SDPA inside, of any library; nothing is patched, and the report says all."""

import threading
import warnings
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import skeinformer
from skeinformer import sketched
from skeinformer.models import Report
from skeinformer.models.policy import Certified
from tests.helpers import lengths_mask

N, WIDTH, HEADS = 48, 16, 2
SKETCH: dict[str, Any] = {"budget": 8, "min_length": 0}


class Block(nn.Module):
    """Attention as people write it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)  # (b, h, n, p)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        return x + self.out(heads.transpose(1, 2).reshape(b, n, WIDTH))


class Model(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, mask, **options)
        return x


@pytest.fixture
def model() -> Model:
    return Model().eval()


@pytest.fixture
def x() -> Tensor:
    return 3 * torch.randn(2, N, WIDTH)


@torch.no_grad()
def test_calls_are_sketched_inside_and_nowhere_else(model: Model, x: Tensor) -> None:
    function = F.scaled_dot_product_attention
    exact = model(x)
    with sketched("cluster", **SKETCH) as report:
        inside = model(x)
        assert F.scaled_dot_product_attention is function  # nothing is patched
    assert torch.equal(model(x), exact)
    assert not torch.allclose(inside, exact, atol=1e-4)
    assert (report.sketched, report.exact, report.error) == (2, 0, None)
    with sketched("cluster", **SKETCH):
        assert torch.equal(model(x), inside)
    with pytest.raises(KeyError), sketched("cluster", **SKETCH):
        raise KeyError
    assert torch.equal(model(x), exact)


@torch.no_grad()
def test_call_i_draws_by_the_seed_of_layer_i(model: Model, x: Tensor) -> None:
    q = torch.randn(2, HEADS, N, 8)
    with sketched("skeinformer", seed=2, **SKETCH):
        found = [F.scaled_dot_product_attention(q, q, q) for _ in range(3)]
    for i, output in enumerate(found):
        module = skeinformer.build("skeinformer", head_dim=8, budget=8, seed=2 * 1009 + i).eval()
        assert torch.equal(output, module(q, q, q))
    assert not torch.equal(found[0], found[1])
    with sketched("skeinformer", seed=None, **SKETCH):
        assert not torch.equal(F.scaled_dot_product_attention(q, q, q), found[0])


@torch.no_grad()
def test_all_ways_to_give_the_arguments() -> None:
    q, mask = torch.randn(2, HEADS, N, 8), lengths_mask([N, 30], N)[:, None, None]
    sdpa = F.scaled_dot_product_attention
    calls = [
        lambda: sdpa(q, q, q, mask, 0.0, False, scale=0.2),
        lambda: sdpa(q, q, value=q, attn_mask=mask, scale=0.2),
        lambda: sdpa(value=q, key=q, query=q, scale=0.2, attn_mask=mask, enable_gqa=False),
        lambda: torch._C._nn.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=0.2),
    ]
    found = []
    for call in calls:
        with sketched(**SKETCH) as report:
            found.append(call())
        assert report.sketched == 1
    assert all(torch.equal(found[0], other) for other in found)
    assert torch.equal(found[0], skeinformer.scaled_dot_product_attention(q, q, q, mask, scale=0.2, **SKETCH))


@torch.no_grad()
def test_the_report_says_what_was_exact_and_why(model: Model, x: Tensor) -> None:
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    with sketched("cluster", budget=8, min_length=20) as report:
        model(x)
        model(x, is_causal=True)
        model(x, mask)
        model(x[:, :6])
        model(x[:, :12])
        nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, batch_first=True).eval()(x)
    assert (report.sketched, report.exact) == (2, 9)
    assert report.reasons == {
        "causal": 2,
        "the mask differs between queries": 2,
        "no more keys than the budget": 2,
        "shorter than min_length": 2,
        "inside torch.nn.MultiheadAttention, which skeinformer.convert takes": 1,
    }
    lines = str(report).splitlines()
    assert lines[:2] == ["cluster(budget=8): 2 calls sketched, 9 exact", "      2 x  exact: causal"]
    with sketched() as report:
        model(x)
    assert report.reasons == {"exact attention takes less time": 2}
    with sketched() as report:
        pass
    assert "no call of torch.nn.functional.scaled_dot_product_attention was seen" in str(report)


@torch.no_grad()
def test_the_measured_error_leaves_the_output_as_it_is(model: Model, x: Tensor) -> None:
    with sketched("cluster", **SKETCH):
        expected = model(x)
    with sketched("cluster", certify=True, **SKETCH) as report:
        assert torch.equal(model(x), expected)
    q = torch.randn(1, HEADS, N, 8)
    with sketched("cluster", certify=True, **SKETCH) as one:
        F.scaled_dot_product_attention(q, q, q)
    _, info = skeinformer.build("cluster", head_dim=8, budget=8, seed=0).eval().certify(q, q, q)
    assert one.error == one.worst_error == pytest.approx(float(info.error.max()))  # of two heads
    assert f"(median), {one.error:.2g} in head {int(info.error[0].argmax())} of call 0 (worst)" in str(one)
    assert report.error is not None


def test_a_broken_head_shows_in_the_report() -> None:
    report = Report("title")
    fine, bad, broken = torch.full((2, 3), 0.01), torch.full((2, 3), 0.01), torch.full((2, 3), 0.01)
    bad[1, 2], broken[0, 1] = 0.9, torch.nan
    for number, error in enumerate((fine, bad)):
        report.add(None, number, Certified(error, error, Counter()))
    assert "0.01 (median), 0.9 in head 2 of call 1 (worst)" in str(report)
    assert (report.error, report.worst_error) == (pytest.approx(0.01), pytest.approx(0.9))
    report.add(None, 2, Certified(broken, broken, Counter()))
    assert "nan in head 1 of call 2 (worst)" in str(report)


def test_gradients_and_checkpointing(model: Model, x: Tensor) -> None:
    def again() -> tuple[Any, Any]:
        return nullcontext(), sketched(**SKETCH)

    def gradient(**options: Any) -> Tensor:
        torch.manual_seed(0)
        with sketched(**SKETCH) as report:
            y = x
            for block in model.blocks:
                y = checkpoint(block, y, use_reentrant=False, context_fn=again) if options else block(y)
            model.zero_grad()
            y.square().sum().backward()
            found = model.blocks[0].qkv.weight.grad
        assert report.exact == 0
        return found

    plain = gradient()
    assert plain.abs().max() > 0
    torch.testing.assert_close(gradient(checkpointed=True), plain)
    exact = torch.autograd.grad(model(x).square().sum(), model.blocks[0].qkv.weight)[0]
    assert not torch.allclose(plain, exact)


@torch.no_grad()
def test_the_innermost_scope_decides(model: Model, x: Tensor) -> None:
    exact = model(x)
    with sketched("cluster", **SKETCH):
        alone = model(x)
    with sketched("vmean", min_length=0) as outer:
        with sketched("cluster", **SKETCH) as inner:
            assert torch.equal(model(x), alone)
        with sketched("softmax") as none:
            assert torch.equal(model(x), exact)
        assert outer.sketched + outer.exact == 0
        assert not torch.allclose(model(x), alone)
    assert (inner.sketched, none.exact, outer.sketched) == (2, 2, 2)


@torch.no_grad()
def test_our_own_attentions_are_left_alone(x: Tensor) -> None:
    """What a method asks of the fused kernel is not a call of the model."""
    q = torch.randn(2, HEADS, N, 8)
    for method in ("skeinformer", "cluster", "informer", "nystromformer", "longformer", "softmax"):
        module = skeinformer.build(method, head_dim=8, budget=16, seed=0).eval()
        expected, certified = module(q, q, q), module.certify(q, q, q)[1].error
        with sketched("vmean", min_length=0) as report:
            assert torch.equal(module(q, q, q), expected)
            assert torch.equal(module.certify(q, q, q)[1].error, certified)
        assert report.sketched + report.exact == 0
    layer = skeinformer.models.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    expected = layer(x, x, x)[0]  # exact, as it is short
    with sketched("vmean", min_length=0) as report:
        assert torch.equal(layer(x, x, x)[0], expected)
        exact = skeinformer.scaled_dot_product_attention(q, q, q)
    assert torch.equal(exact, F.scaled_dot_product_attention(q, q, q))
    assert report.sketched + report.exact == 0


@torch.no_grad()
def test_as_a_decorator(model: Model, x: Tensor) -> None:
    @sketched("cluster", **SKETCH)
    def run(x: Tensor, *, times: int = 1) -> Tensor:
        """Runs."""
        return times * model(x)

    with sketched("cluster", **SKETCH):
        expected = model(x)
    assert torch.equal(run(x), expected)
    assert torch.equal(run(x, times=2), 2 * expected)  # each call begins with the first seed again
    assert (run.__name__, run.__doc__, run.report.sketched) == ("run", "Runs.", 4)

    def generate() -> Any:
        yield model(x)

    async def compute_later() -> Any:
        return model(x)

    for function in (generate, compute_later):
        with pytest.raises(TypeError, match="is a generator or a coroutine: its code runs after the call has returned"):
            sketched()(function)

    with pytest.raises(TypeError, match="'Model' is a class; decorate its forward"):
        sketched()(Model)
    with pytest.raises(TypeError, match=r"as a decorator write `@skeinformer\.sketched\(\)`"):
        sketched(run)  # type: ignore[arg-type]


def test_a_scope_holds_for_its_thread(model: Model, x: Tensor) -> None:
    exact = model(x).detach()
    scope = sketched("cluster", **SKETCH)
    found: dict[str, Tensor] = {}

    def work(name: str, inside: bool) -> None:
        with torch.no_grad():
            if inside:
                with scope:
                    found[name] = model(x)
            else:
                found[name] = model(x)

    with torch.no_grad(), scope as report:
        here = model(x)
        threads = [threading.Thread(target=work, args=(str(i), i < 4)) for i in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(found[str(i)], here) for i in range(4))
    assert torch.equal(found["4"], exact)
    assert report.sketched == 10  # all entries of one scope count together


@torch.no_grad()
def test_a_causal_model_is_warned_of_once(model: Model, x: Tensor) -> None:
    expected = pytest.warns(UserWarning, match="nothing was sketched: 2 of 2 calls are causal")
    with expected as caught, sketched(**SKETCH):
        model(x, is_causal=True)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sketched(**SKETCH):
            model(x)
            model(x, is_causal=True)
        with sketched():
            model(x)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_compiled_model_is_sketched_inside(backend: str, model: Model, x: Tensor) -> None:
    exact = model(x)
    with sketched("cluster", **SKETCH):
        expected = model(x)
    torch._dynamo.reset()  # graphs of other tests, which are found by the code of the model
    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(compiled(x), exact)
    for _ in range(2):
        with sketched("cluster", **SKETCH):
            torch.testing.assert_close(compiled(x), expected)
            torch.testing.assert_close(compiled(x), expected)  # numbers are constants of the graph
        torch.testing.assert_close(compiled(x), exact)


@torch.no_grad()
def test_a_compiled_model_is_counted_when_it_is_compiled(model: Model, x: Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with sketched("cluster", **SKETCH) as report:
        compiled(x)
    assert (report.sketched, report.exact, report.compiled) == (0, 0, 2)
    assert "2 calls in compiled graphs" in str(report)
    with sketched("cluster", **SKETCH) as report:
        compiled(x)  # the same graph
    assert report.compiled == 0
    assert "not called" not in str(report)
    assert "no call" in str(report)
    assert "Calls in a graph that was compiled earlier are sketched by the same rules, but not counted" in str(report)


def test_errors_in_compiled_graphs_are_not_measured_and_a_warning_says_so(model: Model, x: Tensor) -> None:
    model.eval()
    compiled = torch.compile(model, backend="eager")
    scope = sketched(certify=True, **SKETCH)
    with pytest.warns(UserWarning, match="calls in compiled graphs have no measured error"), torch.no_grad(), scope:
        compiled(x)
    assert scope.report.error is None
    scope = sketched(certify=True, **SKETCH)
    with pytest.warns(UserWarning, match="calls in compiled graphs have no measured error"), torch.no_grad(), scope:
        compiled(x)  # the same graph
    assert scope.report.error is None
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the error of a head")
        with sketched(certify=True, **SKETCH) as report:
            model(x)
    assert report.error is not None
