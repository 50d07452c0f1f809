"""Forward passes of the three models in numpy, from the files of the weights, and how far torch's are from them.

Nothing of the loaders but the readers of files is shared: names and shapes are those of the files, numbers are float64.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from scipy.special import erf, softmax

from benchmarks.models import minilm, tabpfn, whisper, whisper_weights
from benchmarks.models.audio import log_mel, read_wav, split
from benchmarks.models.packages import data_file
from benchmarks.models.speech import SPOKEN, clip, word_error_rate

Array = NDArray[np.float64]
Get = Callable[[str], Array]
TOLERANCE = 1e-4
TOKENS, ROWS = 512, 200


class Compared(NamedTuple):
    """What was compared, and the largest difference in units of the largest absolute value, at least 1."""

    what: str
    difference: float


def linear(x: Array, get: Get, name: str) -> Array:
    return x @ get(f"{name}weight").T + get(f"{name}bias")


def normalize(x: Array, gain: Array, bias: Array, epsilon: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    normalized: Array = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return normalized * gain + bias


def gelu(x: Array) -> Array:
    phi: Array = (1 + erf(x / np.sqrt(2))) / 2
    return x * phi


def attend(q: Array, k: Array, v: Array, heads: int, causal: bool = False) -> Array:
    """softmax(q k^T / sqrt(p)) v of rows (n, heads p) and (m, heads p): (n, heads p)."""
    q, k, v = (x.reshape(len(x), heads, -1).swapaxes(0, 1) for x in (q, k, v))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])  # (heads, n, m)
    if causal:
        scores = np.where(np.tri(*scores.shape[1:]) > 0, scores, -np.inf)
    output: Array = (softmax(scores, -1) @ v).swapaxes(0, 1)
    return output.reshape(len(output), -1)


def getter(arrays: Mapping[str, Any]) -> Get:
    return lambda name: np.asarray(arrays[name], np.float64)


def minilm_forward(get: Get, tokens: NDArray[np.int64]) -> Array:
    """The last hidden states of tokens (n,): (n, 384)."""

    def norm(x: Array, name: str) -> Array:
        return normalize(x, get(f"{name}.LayerNorm.weight"), get(f"{name}.LayerNorm.bias"), 1e-12)

    positions, kind = get("embeddings.position_embeddings.weight"), get("embeddings.token_type_embeddings.weight")[0]
    x = get("embeddings.word_embeddings.weight")[tokens] + positions[: len(tokens)] + kind
    x = norm(x, "embeddings")
    for i in range(6):
        layer = f"encoder.layer.{i}"
        q, k, v = (linear(x, get, f"{layer}.attention.self.{name}.") for name in ("query", "key", "value"))
        x = norm(x + linear(attend(q, k, v, 12), get, f"{layer}.attention.output.dense."), f"{layer}.attention.output")
        hidden = gelu(linear(x, get, f"{layer}.intermediate.dense."))
        x = norm(x + linear(hidden, get, f"{layer}.output.dense."), f"{layer}.output")
    return x


def whisper_encode(get: Get, features: Array) -> Array:
    """The encoder's states of features (80, 3000): (1500, 512)."""
    x = features
    for name, stride in (("conv1", 1), ("conv2", 2)):
        shifted = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (1, 1))), 3, axis=1)[:, ::stride]
        x = gelu(
            np.tensordot(get(f"encoder/{name}/weight"), shifted, ([1, 2], [0, 2]))
            + get(f"encoder/{name}/bias")[:, None]
        )
    return whisper_layers(get, "encoder", x.T, None)


def whisper_decode(get: Get, tokens: NDArray[np.int64], encoded: Array) -> Array:
    """The decoder's logits after each of tokens (n,): (n, vocabulary)."""
    table = get("decoder/embeddings/weight")
    return whisper_layers(get, "decoder", table[tokens], encoded) @ table.T


def whisper_layers(get: Get, side: str, x: Array, encoded: Array | None) -> Array:
    def norm(x: Array, name: str) -> Array:
        return normalize(x, get(f"{name}/layer_norm/gamma"), get(f"{name}/layer_norm/beta"), 1e-5)

    x = x + get(f"{side}/position_encodings/encodings")[: len(x)]
    for i in range(whisper_weights.LAYERS):
        layer = f"{side}/layer_{i}"
        qkv = linear(norm(x, f"{layer}/self_attention"), get, f"{layer}/self_attention/linear_0/")
        q, k, v = np.split(qkv, 3, 1)
        heads = attend(q, k, v, whisper.HEADS, causal=encoded is not None)
        x = x + linear(heads, get, f"{layer}/self_attention/linear_1/")
        if encoded is not None:
            q = linear(norm(x, f"{layer}/attention"), get, f"{layer}/attention/linear_0/")
            k, v = np.split(linear(encoded, get, f"{layer}/attention/linear_1/"), 2, 1)
            x = x + linear(attend(q, k, v, whisper.HEADS), get, f"{layer}/attention/linear_2/")
        hidden = gelu(linear(norm(x, f"{layer}/ffn"), get, f"{layer}/ffn/linear_0/"))
        x = x + linear(hidden, get, f"{layer}/ffn/linear_1/")
    return norm(x, side)


def tabpfn_forward(get: Get, x_train: Array, y_train: Array, x_test: Array) -> Array:
    """Logits of test rows (m, 100) by training rows (n, 100): (m, 10). All rows attend the keys of training rows."""
    n = len(x_train)
    x = linear(np.vstack([x_train, x_test]), get, "encoder.")
    x[:n] += linear(y_train[:, None], get, "y_encoder.")
    for i in range(tabpfn.LAYERS):
        layer = f"layers.{i}"
        qkv = x @ get(f"{layer}.attention.in_proj_weight").T + get(f"{layer}.attention.in_proj_bias")
        q, k, v = np.split(qkv, 3, 1)
        x = x + linear(attend(q, k[:n], v[:n], tabpfn.HEADS), get, f"{layer}.attention.out_proj.")
        x = normalize(x, get(f"{layer}.norm1.weight"), get(f"{layer}.norm1.bias"), 1e-5)
        x = x + linear(gelu(linear(x, get, f"{layer}.linear1.")), get, f"{layer}.linear2.")
        x = normalize(x, get(f"{layer}.norm2.weight"), get(f"{layer}.norm2.bias"), 1e-5)
    return linear(gelu(linear(x[n:], get, "decoder.0.")), get, "decoder.2.")


def check_minilm() -> list[Compared]:
    """MiniLM on 512 tokens of the Python language reference."""
    from skeinformer.cli.pretrained import load_text

    model = minilm.load_minilm()
    tokens = minilm.passages(model.tokenizer, [load_text()], TOKENS, 1)
    get = getter(load_file(data_file(minilm.PACKAGE, "model.safetensors")))
    with torch.no_grad():
        ours = model.model(input_ids=tokens).last_hidden_state[0]
    return [compare(f"MiniLM, last states of {TOKENS} tokens", ours, minilm_forward(get, tokens[0].numpy()))]


def check_whisper() -> list[Compared]:
    """Whisper on the first window of two_cities.wav, and its transcript of all of that clip."""
    model, name = whisper.load_whisper(), "two_cities.wav"
    samples, get = read_wav(clip(name)), getter(whisper_weights.whisper_arrays())
    features = log_mel(split(samples)[0])
    tokens = np.array([model.vocabulary.index(token) for token in (*whisper.PROMPT, "ĠIt", "Ġwas", "Ġthe", "Ġbest")])
    with torch.no_grad():
        encoded = model.model.model.encoder(torch.from_numpy(features)[None])
        logits = model.model(encoder_outputs=encoded, decoder_input_ids=torch.from_numpy(tokens)[None]).logits[0]
    states = whisper_encode(get, features.astype(np.float64))
    wrong = word_error_rate(SPOKEN[name], whisper.transcribe(model, samples))
    return [
        compare("Whisper, encoder's states of 1,500 frames", encoded.last_hidden_state[0], states),
        compare(f"Whisper, decoder's logits after {len(tokens)} tokens", logits, whisper_decode(get, tokens, states)),
        Compared(f"Whisper, transcript of {name} and Dickens's text (share of wrong words)", wrong),
    ]


def check_tabpfn() -> list[Compared]:
    """TabPFN on random rows, whose class is where the sum of their features lies."""
    x = np.random.default_rng(0).standard_normal((2 * ROWS, 8))
    y = np.digitize(x.sum(1), (-2, 2)).astype(np.float64)
    train, test = tabpfn.prepare(x[:ROWS], x[ROWS:])
    model = tabpfn.load_tabpfn()
    with torch.no_grad():
        ours = model(train, torch.from_numpy(y[:ROWS, None]).float(), test)[:, 0]
    inputs = train[:, 0].double().numpy(), y[:ROWS], test[:, 0].double().numpy()
    theirs = tabpfn_forward(getter(model.state_dict()), *inputs)
    return [compare(f"TabPFN, logits of {ROWS} test rows by {ROWS} training rows", ours, theirs)]


CHECKS = {"minilm": check_minilm, "whisper": check_whisper, "tabpfn": check_tabpfn}


def compare(what: str, ours: torch.Tensor, theirs: Array) -> Compared:
    difference = np.abs(ours.double().numpy() - theirs).max() / max(1.0, np.abs(theirs).max())
    return Compared(what, float(difference))
