"""What a sketch in Whisper's encoder does to words: `python -m benchmarks.speech`.

Whisper base transcribes clips with its encoder's attention exact and sketched. The table has the share of words that
differ from the exact transcript, the share that are wrong, and the error of the heads on the first clip's window. As a
yardstick, its first row is exact attention where the clips have a little white noise.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from benchmarks.models.audio import Floats, read_wav
from benchmarks.models.speech import SPOKEN, clip, synthesize, word_error_rate
from benchmarks.models.whisper import encoder_inputs, load_whisper, transcribe, windows
from skeinformer import build, sketched

VARIANTS: dict[str, dict[str, Any]] = {
    "16 clusters": {"method": "cluster", "budget": 16},
    "128 clusters": {"method": "cluster", "quality": "accurate"},
    "512 clusters": {"method": "cluster", "quality": "accurate", "budget": 512},
    "window + 16": {"method": "cluster_window", "budget": 16},
    "window + 64": {"method": "cluster_window", "budget": 64, "num_pilots": 32},
    "window + 128": {"method": "cluster_window", "quality": "accurate"},
    "Skeinformer 256": {"method": "skeinformer", "budget": 256},
    "Nystromformer 256": {"method": "nystromformer", "budget": 256},
}


@torch.no_grad()
def head_errors(layers: Sequence[Any], options: dict[str, Any]) -> torch.Tensor:
    """Return the relative error of every head of every layer, without the window's padding."""
    errors = []
    for q, k, v in layers:
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        output = build(head_dim=q.shape[-1], seed=0, **_named(options)).eval()(q, k, v)
        errors.append(((output - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))).flatten())
    return torch.cat(errors)


def with_noise(samples: Floats, loudness: float) -> Floats:
    """Return a clip with white noise of `loudness` times its standard deviation."""
    added = np.random.default_rng(0).standard_normal(samples.shape) * samples.std() * loudness
    noisy: Floats = (samples + added).astype(samples.dtype)
    return noisy


def _named(options: dict[str, Any]) -> dict[str, Any]:
    return {"name" if key == "method" else key: value for key, value in options.items()}


def append(out: Path | None, record: dict[str, Any]) -> None:
    """Add a record to a file of JSON lines, if there is one."""
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps({"kind": "speech", "clips": len(record["differ"]), **record}) + "\n")


@torch.no_grad()
def main(
    variants: Sequence[str] = tuple(VARIANTS),
    books: Path | None = None,
    out: Path | None = None,
    threads: int = 2,
    noise: float = 0.01,
) -> None:
    """Compare transcripts.

    Args:
        variants: Which sketches.
        books: A parquet file with books, from which espeak-ng reads more clips.
        out: Where to add records, JSON lines.
        threads: Threads of torch.
        noise: How loud white noise is beside the clip, for the transcripts with exact attention and noise.
    """
    torch.set_num_threads(threads)
    whisper = load_whisper()
    clips = [(name, read_wav(clip(name)), text) for name, text in SPOKEN.items()]
    if books is not None:
        clips += [(made.path.stem, read_wav(made.path), made.text) for made in synthesize(books)]
    exact = {name: transcribe(whisper, samples) for name, samples, _ in clips}
    layers = encoder_inputs(whisper, windows(clips[0][1])[:1])
    exactly = sum(word_error_rate(text, exact[name]) for name, _, text in clips) / len(clips)
    print(f"{len(clips)} clips; exact: {100 * exactly:.1f} % of words wrong")
    print(f"{'':20} {'differ %':>9} {'worst %':>8} {'wrong %':>8} {'head error: mean':>17} {'worst':>6}")
    heard = {name: transcribe(whisper, with_noise(samples, noise)) for name, samples, _ in clips}
    changed = [word_error_rate(exact[name], heard[name]) for name in exact]
    print(
        f"{f'exact, noise {noise:g}':20} {100 * sum(changed) / len(clips):9.1f} {100 * max(changed):8.1f}", flush=True
    )
    append(out, {"variant": f"exact, noise {noise:g}", "differ": changed})
    for variant in variants:
        options = VARIANTS[variant]
        differ, wrong = [], []
        for name, samples, text in clips:
            with sketched(min_length=1000, **options):
                said = transcribe(whisper, samples)
            differ.append(word_error_rate(exact[name], said))
            wrong.append(word_error_rate(text, said))
        errors = head_errors(layers, options)
        numbers = [100 * sum(differ) / len(clips), 100 * max(differ), 100 * sum(wrong) / len(clips)]
        print(
            f"{variant:20} {numbers[0]:9.1f} {numbers[1]:8.1f} {numbers[2]:8.1f} "
            f"{errors.mean():17.3f} {errors.max():6.2f}",
            flush=True,
        )
        rounded = [round(x, 4) for x in errors.tolist()]
        append(out, {"variant": variant, "differ": differ, "wrong": wrong, "head_errors": rounded})


if __name__ == "__main__":
    tyro.cli(main)
