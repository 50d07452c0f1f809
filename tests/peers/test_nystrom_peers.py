"""nystrom-attention and transformers' Nystromformer beside ours: same weights, same output, and their defects."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import build
from skeinformer.attention import Attention
from tests.helpers import generator, lengths_mask

pytestmark = pytest.mark.peers

P = 8
LANDMARKS = 6
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, P)).transpose(1, 2)  # (b, h, n, p)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # (b, n, h * p)


def tokens(b: int, n: int, heads: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(b, n, heads * P, generator=generator(seed))


def ours(heads: int, conv: Tensor | None = None) -> Attention:
    """With the peer's convolution weights, (h, 1, kernel, 1), where it has them."""
    if conv is None:
        return build("nystromformer", head_dim=P, budget=LANDMARKS)
    module = build("nystromformer", head_dim=P, budget=LANDMARKS, conv_kernel=conv.shape[2], num_heads=heads)
    module.load_state_dict({"conv.weight": conv})
    return module


def lucidrains(heads: int, conv_kernel: int | None = None, scale: float = 1.0) -> Any:
    """nystrom-attention's layer without its output projection; queries and keys multiplied to make A less uniform."""
    package = pytest.importorskip("nystrom_attention", reason="nystrom-attention is not installed")
    options = {} if conv_kernel is None else {"residual_conv_kernel": conv_kernel}
    layer = package.NystromAttention(
        heads * P, dim_head=P, heads=heads, num_landmarks=LANDMARKS, residual=conv_kernel is not None, **options
    )
    layer.to_out = torch.nn.Identity()
    with torch.no_grad():
        layer.to_qkv.weight[: 2 * heads * P] *= scale
    return layer


def beside(layer: Any, x: Tensor, **masks: Tensor) -> Tensor:
    """Ours with the weights of nystrom-attention's layer."""
    q, k, v = (split(y, layer.heads) for y in layer.to_qkv(x).chunk(3, -1))
    conv = layer.res_conv.weight if layer.residual else None
    return merge(ours(layer.heads, conv)(q, k, v, **masks))


@pytest.mark.parametrize("n", [6, 12, 30, 48])
@pytest.mark.parametrize("conv_kernel", [None, 5])
def test_nystrom_attention_of_one_matrix(n: int, conv_kernel: int | None) -> None:
    """One example, one head, a length that the landmarks divide: the published formula."""
    layer, x = lucidrains(1, conv_kernel, scale=3.0), tokens(1, n, 1)
    if n == LANDMARKS:  # ours is exact; the peer's six iterations are not, so give it more
        layer.pinv_iterations = 25
        layer, x = layer.double(), x.double()
    torch.testing.assert_close(beside(layer, x), layer(x), **TOLERANCE)


def test_defect_nystrom_attention_scales_by_the_largest_norm_of_the_batch() -> None:
    """The start of its inverse is divided by a maximum over examples and heads: an example depends on its mates."""
    layer, x = lucidrains(1, scale=3.0), tokens(2, 30, 1)
    alone = torch.cat([layer(x[:1]), layer(x[1:])])
    assert (alone - layer(x)).abs().max() > 1e-2
    torch.testing.assert_close(beside(layer, x), alone, **TOLERANCE)
    heads = lucidrains(2, scale=3.0)
    x = tokens(1, 30, 2)
    assert (heads(x) - beside(heads, x)).abs().max() > 1e-3


def test_defect_nystrom_attention_attends_to_the_zeros_that_it_pads_with() -> None:
    """n = 32 and 6 landmarks: it prepends 4 zero tokens and, without a mask, counts them as real."""
    layer, x = lucidrains(1, scale=3.0), tokens(1, 32, 1)
    theirs = layer(x)
    assert (theirs - beside(layer, x)).abs().max() > 1e-2
    with_zeros = torch.nn.functional.pad(x, (0, 0, 4, 0))
    torch.testing.assert_close(theirs, beside(layer, with_zeros)[:, 4:], **TOLERANCE)


def test_defect_nystrom_attention_lets_padding_move_the_landmarks() -> None:
    """Segments are of positions, not of real tokens: masked right padding changes its result, and not ours."""
    layer, x = lucidrains(1, scale=3.0), tokens(1, 30, 1)
    longer, mask = torch.nn.functional.pad(x, (0, 0, 0, 30)), lengths_mask([30], 60)
    assert (layer(longer, mask=mask)[:, :30] - layer(x)).abs().max() > 1e-2
    padded = beside(layer, longer, key_mask=mask, query_mask=mask)[:, :30]
    torch.testing.assert_close(padded, beside(layer, x), rtol=1e-5, atol=1e-5)


def hugging_face(heads: int, n: int, conv_kernel: int | None = None) -> Any:
    """transformers' self-attention; queries and keys multiplied to make A less uniform."""
    module = pytest.importorskip(
        "transformers.models.nystromformer.modeling_nystromformer", reason="transformers is not installed"
    )
    config = module.NystromformerConfig(
        hidden_size=heads * P,
        num_attention_heads=heads,
        num_landmarks=LANDMARKS,
        segment_means_seq_len=n,
        conv_kernel_size=conv_kernel or 1,
        attention_probs_dropout_prob=0.0,
        inv_coeff_init_option=False,
    )
    layer = module.NystromformerSelfAttention(config).eval()
    layer.conv_kernel_size = conv_kernel  # its configuration does not take None, its forward does
    with torch.no_grad():
        layer.query.weight *= 3
        layer.key.weight *= 3
    return layer


def beside_hugging_face(layer: Any, x: Tensor, **masks: Tensor) -> Tensor:
    """Ours with the weights of transformers' layer."""
    heads = layer.num_attention_heads
    q, k, v = (split(projection(x), heads) for projection in (layer.query, layer.key, layer.value))
    conv = None if layer.conv_kernel_size is None else layer.conv.weight
    return merge(ours(heads, conv)(q, k, v, **masks))


@pytest.mark.parametrize("conv_kernel", [None, 5])
@pytest.mark.parametrize("n", [6, 12, 30])
def test_transformers_on_a_batch_once_it_scales_per_matrix(n: int, conv_kernel: int | None) -> None:
    layer, x = hugging_face(2, n, conv_kernel), tokens(3, n, 2)
    layer.init_option = "each"  # anything but "original"
    torch.testing.assert_close(beside_hugging_face(layer, x), layer(x)[0], **TOLERANCE)


def test_transformers_of_one_matrix_as_it_is() -> None:
    layer, x = hugging_face(1, 30), tokens(1, 30, 1)
    torch.testing.assert_close(beside_hugging_face(layer, x), layer(x)[0], **TOLERANCE)


def test_defect_transformers_scales_by_the_largest_norm_of_the_batch() -> None:
    layer, x = hugging_face(1, 30), tokens(2, 30, 1)
    alone = torch.cat([layer(x[:1])[0], layer(x[1:])[0]])
    assert (alone - layer(x)[0]).abs().max() > 1e-2
    torch.testing.assert_close(beside_hugging_face(layer, x), alone, **TOLERANCE)


def test_defect_transformers_cannot_be_asked_to_scale_per_matrix() -> None:
    """Its option for that reads the configuration as a dictionary, under another name."""
    module = pytest.importorskip("transformers.models.nystromformer.modeling_nystromformer")
    config = module.NystromformerConfig(hidden_size=P, num_attention_heads=1, inv_coeff_init_option=True)
    with pytest.raises(TypeError, match="not subscriptable"):
        module.NystromformerSelfAttention(config)


def test_defect_transformers_takes_one_length_that_landmarks_divide() -> None:
    layer = hugging_face(1, 30)
    for n in (29, 32):
        with pytest.raises(RuntimeError, match="shape"):
            layer(tokens(1, n, 1))
    with pytest.raises(RuntimeError, match="shape"):
        hugging_face(1, 32)(tokens(1, 32, 1))
    for n in (1, 29, 32):
        assert beside_hugging_face(layer, tokens(1, n, 1)).shape == (1, n, P)


def test_defect_transformers_has_padding_in_its_landmarks() -> None:
    """Its mask enters only softmax(Q~ K^T): what stands in padded positions changes the rows of real tokens."""
    layer, x = hugging_face(1, 30), tokens(1, 30, 1)
    mask = lengths_mask([18], 30)
    additive = torch.where(mask, 0.0, -math.inf)[:, None, None]
    other = x.where(mask[..., None], 5.0)
    assert (layer(x, additive)[0] - layer(other, additive)[0])[:, :18].abs().max() > 1e-2
    masks = {"key_mask": mask, "query_mask": mask}
    assert torch.equal(beside_hugging_face(layer, x, **masks), beside_hugging_face(layer, other, **masks))
