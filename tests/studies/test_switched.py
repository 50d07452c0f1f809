"""The studies of whole models give a model its attention, or say that it keeps its own."""

import pytest

pytest.importorskip("transformers", reason="needs transformers, of the extra `lab`")

import transformers

from skeinformer.lab.contender import Contender
from skeinformer.lab.measure.approx import Case
from studies.switched import switch


def test_a_model_that_keeps_its_own_attention_is_refused() -> None:
    config = transformers.MPNetConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with pytest.raises(ValueError, match="MPNetModel does not choose its attention by name"):
        switch(transformers.MPNetModel(config), Case(Contender("cluster"), 5))
