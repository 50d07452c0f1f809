"""Tiny Hugging Face models with random weights, for the tests of `skeinformer.huggingface`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

from skeinformer.models import huggingface
from skeinformer.models.policy import Policy

VOCABULARY, LENGTH = 99, 24
WIDTH, HEADS, LAYERS = 32, 4, 2
WORDS = [f"w{i}" for i in range(90)]  # one token each in the folder of `save_bert`


def register(method: str = "cluster", **options: Any) -> Policy:
    """Call `huggingface.register` for models as short as these, in which no sketch would be faster."""
    return huggingface.register(method, **{"min_length": 0, **options})


def forward(module: nn.Module, *inputs: Any, **options: Any) -> Tensor:
    """Return (b, n, h, p_v), as transformers calls our attention."""
    output: Tensor = AttentionInterface._global_mapping["skein"](module, *inputs, **options)[0]
    return output


def layer(**attributes: Any) -> nn.Module:
    """Return an attention module in evaluation mode, not causal, with these attributes."""
    module = nn.Module().eval()
    for name, value in {"is_causal": False, **attributes}.items():
        setattr(module, name, value)
    return module


class Tiny(NamedTuple):
    """How to make a model, how many of its attention layers are bidirectional, and whether it takes tokens."""

    make: Callable[[], Any]
    sketched: int = LAYERS
    takes_tokens: bool = True


def bert(kind: str = "Bert", **options: Any) -> Any:
    """BERT or RoBERTa, without dropout."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=WIDTH,
        max_position_embeddings=4 * LENGTH,
        hidden_dropout_prob=0.0,
        initializer_range=0.3,  # attention that is not flat
        **{"attention_probs_dropout_prob": 0.0, **options},
    )
    return getattr(transformers, f"{kind}Model")(config)


def distilbert() -> Any:
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=WIDTH,
        hidden_dim=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_position_embeddings=4 * LENGTH,
        attention_dropout=0.0,
        dropout=0.0,
        initializer_range=0.3,
    )
    return transformers.DistilBertModel(config)


def vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=WIDTH,
        image_size=20,
        patch_size=4,
        initializer_range=0.3,
    )
    return transformers.ViTModel(config)


def bart() -> Any:
    """The whole of BART; `bart().get_encoder()` is its encoder."""
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=WIDTH,
        decoder_ffn_dim=WIDTH,
        max_position_embeddings=4 * LENGTH,
        dropout=0.0,
        init_std=0.3,
    )
    return transformers.BartModel(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=WIDTH, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0
    )
    return transformers.T5Model(config)


def modernbert() -> Any:
    """Layers 0 and 2 see everything, layers 1 and 3 a window of 3 tokens on each side."""
    config = transformers.ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        layer_types=["full_attention", "sliding_attention"] * 2,
        local_attention=6,
        max_position_embeddings=4 * LENGTH,
        pad_token_id=0,
        initializer_range=0.3,
    )
    return transformers.ModernBertModel(config)


def grouped(kind: str = "EuroBert") -> Any:
    """EuroBERT (an encoder) or Llama (a decoder): two heads of keys for four of queries."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=4 * LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    return getattr(transformers, f"{kind}Model")(config)


ENCODERS = {
    "bert": Tiny(bert),
    "roberta": Tiny(lambda: bert("Roberta", pad_token_id=0)),
    "distilbert": Tiny(distilbert),
    "bart_encoder": Tiny(lambda: bart().get_encoder()),
    "modernbert": Tiny(modernbert),
    "eurobert": Tiny(grouped),
    "vit": Tiny(vit, takes_tokens=False),
}
TEXT_ENCODERS = [name for name, tiny in ENCODERS.items() if tiny.takes_tokens]


def encoder(name: str) -> Any:
    """One of ENCODERS in evaluation mode, the same weights every time."""
    torch.manual_seed(0)
    return ENCODERS[name].make().eval()


def sketched(name: str = "bert") -> Any:
    """One of ENCODERS with attention "skein"."""
    model = encoder(name)
    model.set_attn_implementation("skein")
    return model


def inputs(name: str, b: int = 2, n: int = LENGTH) -> dict[str, Tensor]:
    """Tokens, or images of 5 x 5 patches and a class token: 26 rows."""
    source = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(b, 3, 20, 20, generator=source)}
    return {"input_ids": torch.randint(3, VOCABULARY, (b, n), generator=source)}


def hidden(model: Any, given: dict[str, Tensor], **options: Any) -> Tensor:
    """The last hidden state, (b, n, width), without gradient."""
    with torch.no_grad():
        state: Tensor = model(**given, **options).last_hidden_state
    return state


def save_bert(folder: Path) -> Path:
    """Save a model of 96 positions and a tokenizer of 90 words, as `load_model` takes them."""
    torch.manual_seed(0)
    bert().save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder
