"""Errors of gradients, of a case and of the same with peaked attention."""

import torch

from skeinformer import build
from skeinformer.lab.measure.errors import exact_attention, input_gradients
from studies.gradients import Case, errors_of, mean_errors
from tests.helpers import generator, tensors


def test_the_errors_of_exact_attention_are_none_and_those_of_v_mean_are_all() -> None:
    q, k, v = (x.detach() for x in tensors(1, 2, 50, p=8, p_v=8))
    case = Case("random", (q, k, v), torch.randn(q.shape, generator=generator(1), dtype=torch.float64)).peaked(3.0)
    assert torch.equal(case.inputs[0], 3 * q)
    assert torch.equal(case.inputs[1], k)
    truth = input_gradients(exact_attention, case.inputs, case.upstream)
    exact = errors_of(build("softmax", head_dim=8).eval(), case, truth)
    nothing = errors_of(build("vmean", head_dim=8).eval(), case, truth)
    assert max(exact[:3]) < 1e-6
    assert abs(exact.cosine - 1) < 1e-6
    assert nothing.query == nothing.key == 1
    assert mean_errors([nothing, nothing]).key == 1
