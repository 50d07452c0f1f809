"""Models over shares, in the processes of the pool: every function gets the group first, or None for one process."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import skeinformer
from skeinformer import distributed
from tests.distributed.cases import Result, as_arrays
from tests.helpers import lengths_mask

BATCH, LENGTH, WORDS, CLASSES = 4, 48, 11, 3
LENGTHS = {1: (48,), 2: (35, 13), 4: (20, 0, 8, 20)}


class Encoder(nn.Module):
    """A classifier of the mean of its tokens."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor, places: Tensor, mask: Tensor, group: Any) -> Tensor:
        hidden = self.words(ids) + self.places(places)
        for layer in self.encoder.layers:
            if self.checkpointed:
                hidden = checkpoint(layer, hidden, None, ~mask, use_reentrant=False)
            else:
                hidden = layer(hidden, src_key_padding_mask=~mask)
        if group is None:
            real = hidden * mask[..., None]
            return self.head(real.sum(1) / mask.sum(1, keepdim=True))
        return self.head(distributed.mean_over_tokens(hidden, mask, group))


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids, places, mask, labels."""
    ids = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(LENGTH)[None], lengths_mask([48, 30, 12, 40], LENGTH), torch.tensor([0, 2, 1, 0])


def double_encoder(method: str, group: Any, checkpointed: bool) -> Encoder:
    torch.manual_seed(3)
    model = Encoder(checkpointed).double()
    skeinformer.convert(model, method, budget=5, min_length=0, group=group)
    return model


def encoder(group: Any, method: str = "cluster", checkpointed: bool = False, examples: slice = slice(BATCH)) -> Result:
    """Logits, loss and gradients of parameters, in training."""
    model = double_encoder(method, group, checkpointed)
    ids, places, mask, labels = batch()
    ids, mask, labels = ids[examples], mask[examples], labels[examples]
    if group is not None:
        ids, places, mask = distributed.shard(
            ids, places, mask, group=group, lengths=LENGTHS[dist.get_world_size(group)]
        )
    torch.manual_seed(4)  # training draws from here
    logits = model(ids, places, mask, group)
    loss = nn.functional.cross_entropy(logits, labels)
    loss.backward()
    if group is not None:
        distributed.average_gradients(model, group)
    return as_arrays({"logits": logits, "loss": loss, **gradients(model)})


def classifier(group: Any, pair: bool) -> Result:
    """Logits and gradients of the Long Range Arena's model in training, with dropout; it divides its input."""
    from lra.model import Classifier, ModelConfig, PairClassifier
    from lra.parallel import set_sequence_group

    torch.manual_seed(3)
    config = ModelConfig(WORDS, CLASSES, LENGTH, "cluster", budget=5, dim=12, feedforward_dim=17, dropout=0.3)
    model = (PairClassifier if pair else Classifier)(config).double().train()
    set_sequence_group(model, None if group is None else distributed.Group.of(group))
    ids, _, mask, labels = batch()
    torch.manual_seed(4)
    arguments = (ids, ids[:, :5], mask, None) if pair else (ids[:, :47], mask[:, :47])
    logits = model(*arguments)
    nn.functional.cross_entropy(logits, labels).backward()
    if group is not None:
        distributed.average_gradients(model, group)
    return as_arrays({"logits": logits, **gradients(model)})


def trained(group: Any, job: Any) -> None:
    """`train` as torchrun starts it, on all ranks of a pool of its own: accelerate keeps what it finds."""
    result = {
        "RANK": dist.get_rank(),
        "WORLD_SIZE": dist.get_world_size(),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 0,
    }
    os.environ.update({name: str(value) for name, value in result.items()}, LOCAL_RANK=str(dist.get_rank()))
    from lra.train import train

    train(job)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def data_parallel(group: Any, kind: str) -> Result:
    """Gradients for two halves of the batch along one axis of a mesh, two shares of the sequence along the other."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "data"))
    model = double_encoder("cluster", mesh["sequence"], False)
    ids, places, mask, labels = batch()
    half = slice(2) if mesh["data"].get_local_rank() == 0 else slice(2, 4)
    ids, places, mask = distributed.shard(ids[half], places, mask[half], group=mesh["sequence"], lengths=(35, 13))
    wrapped: Any
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        wrapped = fully_shard(model, mesh=mesh)
    torch.manual_seed(4)
    logits = wrapped(ids, places, mask, mesh["sequence"])
    nn.functional.cross_entropy(logits, labels[half]).backward()
    result = gradients(model)
    if kind == "fsdp":
        result = {name: x.full_tensor() for name, x in result.items()}
    return as_arrays(result)


@torch.no_grad()  # by the seed
def compiled(group: Any) -> tuple[bool, str]:
    """Whether a compiled model has the same output, and the error where a graph may not end."""
    model = double_encoder("cluster", group, False).eval()
    ids, places, mask, _ = batch()
    expected = model(ids, places, mask, group)
    torch.compiler.reset()
    result = torch.compile(model, backend="eager")(ids, places, mask, group)
    torch.compiler.reset()
    try:
        torch.compile(model, backend="eager", fullgraph=True)(ids, places, mask, group)
    except Exception as error:
        return torch.allclose(result, expected), str(error)
    return torch.allclose(result, expected), ""


def bert(group: Any, checkpointed: bool = False, one_rank: bool = False) -> Result:
    """Hidden states, logits of the first token, and gradients, of a small BERT with random weights.

    one_rank: all but one token, which is padding, are on the first rank.
    """
    from transformers import BertConfig, BertForSequenceClassification

    from skeinformer import huggingface

    huggingface.register("cluster", budget=5, min_length=0, group=group)
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    model = BertForSequenceClassification._from_config(config, attn_implementation="skein").double().train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    ids, places, mask, labels = batch()
    if one_rank:
        ids, places, mask = (nn.functional.pad(x, (0, 1)) for x in (ids, places, mask))
    if group is not None:
        lengths = (LENGTH, 1) if one_rank else (35, 13)
        ids, places, mask = distributed.shard(ids, places, mask, group=group, lengths=lengths)
    torch.manual_seed(4)
    hidden = model.bert(ids, attention_mask=mask, position_ids=places).last_hidden_state
    first = hidden[:, 0] if group is None else distributed.token_at(hidden, 0, group)
    logits = model.classifier(model.bert.pooler.activation(model.bert.pooler.dense(first)))
    loss = nn.functional.cross_entropy(logits, labels)
    loss.backward()
    if group is not None:
        distributed.average_gradients(model, group)
        hidden = distributed.gather(hidden, group)
    huggingface.register()
    return as_arrays({"hidden": hidden[:, :LENGTH] * batch()[2][..., None], "logits": logits, **gradients(model)})


def refused(group: Any) -> list[str]:
    """The errors of layers that cannot take a group."""
    messages = []
    decoder = nn.TransformerDecoderLayer(16, 2, 32)
    with_keys, plain = nn.MultiheadAttention(16, 2, add_bias_kv=True), nn.MultiheadAttention(16, 2)
    for model, method in (
        (decoder, "cluster"),
        (with_keys, "cluster"),
        (nn.Linear(16, 2), "cluster"),
        *((plain, name) for name in ("longformer", "softmax", "reformer")),
    ):
        try:
            skeinformer.convert(model, method, budget=5, group=group)
        except ValueError as error:
            messages.append(str(error))
    return messages


def causal(group: Any) -> str:
    from transformers import GPT2Config, GPT2Model

    from skeinformer import huggingface

    huggingface.register(budget=5, group=group)
    config = GPT2Config(vocab_size=WORDS, n_positions=20, n_embd=16, n_layer=1, n_head=2)
    model = GPT2Model._from_config(config, attn_implementation="skein")
    try:
        model(torch.zeros(1, 10, dtype=torch.long))
    except ValueError as error:
        return str(error)
    finally:
        huggingface.register()
    return ""
