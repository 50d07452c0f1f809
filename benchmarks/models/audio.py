"""Speech as Whisper takes it: samples at 16 kHz, windows of at most 30 seconds, 80 log-mel features every 10 ms."""

import wave
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
RATE = 16_000
WINDOW = 30 * RATE
TRANSFORM, HOP, MELS = 400, 160, 80
# of the mel scale: linear to 1 kHz (15 mels), then logarithmic with 27 mels to a factor of 6.4
LINEAR_HZ, LINEAR_MELS, STEP = 1000.0, 15.0, np.log(6.4) / 27


def read_wav(path: Path | str) -> Floats:
    """The samples of a .wav file in [-1, 1], the mean of its channels, at 16 kHz.

    Args:
        path: a file with 16-bit samples at any rate.
    Returns:
        (samples,) in float32.
    Raises:
        ValueError: it is not such a file.
    Example:
        >>> read_wav("speech.wav").shape  # doctest: +SKIP
        (480000,)
    """
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate, frames = file.getparams()[:4]
            content = file.readframes(frames)
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{path} is not a .wav file: {error}") from error
    if width != 2:
        raise ValueError(f"{path} has samples of {8 * width} bits, expected 16")
    samples = np.frombuffer(content[: len(content) // (2 * channels) * 2 * channels], "<i2")
    return resample(samples.reshape(-1, channels).mean(1) / 32768, rate)


def resample(samples: NDArray[np.floating], rate: int) -> Floats:
    """The same sound at 16 kHz: its spectrum is cut, or filled up with zeros.

    Args:
        samples: (samples,) at `rate` a second.
        rate: how many there are a second.
    Returns:
        (samples,) in float32.
    Example:
        >>> resample(np.zeros(48_000), 48_000).shape
        (16000,)
    """
    length = round(len(samples) * RATE / rate)
    if rate == RATE or not length:
        return samples.astype(np.float32)
    spectrum = np.fft.rfft(samples)[: length // 2 + 1]
    return (np.fft.irfft(spectrum, length) * (length / len(samples))).astype(np.float32)


def split(samples: Floats, longest: int = WINDOW, search: int = 5 * RATE) -> list[Floats]:
    """Parts of at most `longest` samples. A part ends in the quietest tenth of a second of its last `search` samples.

    Args:
        samples: (samples,) at 16 kHz.
        longest: the most samples of a part.
        search: how far before the end of a part the quietest place is looked for, a multiple of 1,600.
    Returns:
        The parts in order; together they are `samples`.
    Example:
        >>> [len(part) for part in split(np.zeros(40 * RATE, np.float32))]
        [400000, 240000]
    """
    parts: list[Floats] = []
    while len(samples) > longest:
        blocks = samples[longest - search : longest].reshape(-1, RATE // 10)  # tenths of a second
        quietest = int((blocks**2).mean(1).argmin())
        cut = longest - search + quietest * (RATE // 10) + RATE // 20
        parts.append(samples[:cut])
        samples = samples[cut:]
    return [*parts, samples]


def log_mel(samples: Floats) -> Floats:
    """The features of one window: log10 of the energy in 80 mel bands, 3,000 times in 30 seconds.

    Args:
        samples: at most 480,000 at 16 kHz; a shorter window is filled up with silence.
    Returns:
        (80, 3000) in float32.
    Raises:
        ValueError: there are too many samples.
    Example:
        >>> log_mel(np.zeros(RATE, np.float32)).shape
        (80, 3000)
    """
    if samples.ndim != 1 or len(samples) > WINDOW:
        raise ValueError(f"samples has shape {samples.shape}, expected at most ({WINDOW},); see `split`")
    padded = np.pad(np.pad(samples.astype(np.float64), (0, WINDOW - len(samples))), TRANSFORM // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, TRANSFORM)[:-1:HOP]  # (3000, 400)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(TRANSFORM) / TRANSFORM)
    power = np.abs(np.fft.rfft(frames * hann)) ** 2  # (3000, 201)
    logs = np.log10(np.maximum(power @ mel_filters(), 1e-10))
    features: Floats = ((np.maximum(logs, logs.max() - 8) + 4) / 4).T.astype(np.float32)
    return features


@cache
def mel_filters() -> NDArray[np.float64]:
    """Triangles between neighbours on the mel scale, each of area one: (frequencies, 80)."""
    edges = _to_hz(np.linspace(0, _to_mel(RATE / 2), MELS + 2))
    frequencies = np.linspace(0, RATE / 2, TRANSFORM // 2 + 1)[:, None]  # (201, 1)
    rising = (frequencies - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - frequencies) / np.diff(edges)[1:]
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])


def _to_mel(hz: float) -> float:
    return float(LINEAR_MELS + np.log(hz / LINEAR_HZ) / STEP)  # of frequencies above 1 kHz


def _to_hz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    logarithmic = LINEAR_HZ * np.exp(STEP * (mels - LINEAR_MELS))
    return np.where(mels < LINEAR_MELS, mels * LINEAR_HZ / LINEAR_MELS, logarithmic)
