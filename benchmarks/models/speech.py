"""Clips of speech with their texts, and the share of words that a transcript has wrong."""

import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.models.packages import cache_folder, data_file, replace_file
from skeinformer.cli.pretrained import load_text, parquet_texts

VOICES = ("en-us", "en-gb-x-rp", "en-us+m2", "en-us+m3", "en-us+f3", "en-us+f5")
WORDS, A_MINUTE = 60, 140  # of a clip, about 24 seconds

# what is read: the beginning of A Tale of Two Cities by Charles Dickens, and a sentence of Samuel Beckett
SPOKEN = {
    "two_cities.wav": """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age
    of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the
    season of Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had
    nothing before us, we were all going direct to Heaven, we were all going direct the other way - in short, the period
    was so far like the present period, that some of its noisiest authorities insisted on its being received, for good
    or for evil, in the superlative degree of comparison only.""",
    "beckett.wav": "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better.",
}


class Clip(NamedTuple):
    """A .wav file and what is said in it."""

    path: Path
    text: str


def clip(name: str) -> Path:
    """The path of a clip of the package moonshine-voice: two_cities.wav, beckett.wav or clone-test.wav.

    Args:
        name: the name of the file.
    Returns:
        Its path in the cache.
    Raises:
        FileNotFoundError: the package has not been fetched.
    Example:
        >>> clip("beckett.wav").name  # doctest: +SKIP
        'beckett.wav'
    """
    return data_file("moonshine-voice", name)


def synthesize(books: Path, count: int = 12) -> list[Clip]:
    """Clips of 20 to 30 seconds in which espeak-ng reads from books; those in the cache are not made again.

    Args:
        books: a .parquet file with a column `text`, or a .txt file.
        count: how many clips; the books and the voices take turns.
    Returns:
        The clips. Each lies in the cache with its text in a .txt file of the same name.
    Raises:
        FileNotFoundError: espeak-ng is not installed.
        ValueError: a book has no passage that can be read.
        RuntimeError: espeak-ng could not make a clip.
    Example:
        >>> clips = synthesize(Path("books.parquet"))  # doctest: +SKIP
    """
    texts = parquet_texts(books) if books.suffix == ".parquet" else [load_text(books)]
    passages = [passage(texts[i % len(texts)], (i + 1) / (count + 1)) for i in range(count)]
    return [_spoken(text, VOICES[i % len(VOICES)]) for i, text in enumerate(passages)]


def passage(book: str, share: float, length: int = WORDS) -> str:
    """Words of a book from the first sentence after a share of it where they can be read without doubt.

    They have letters and plain punctuation only, and no names, which a listener could not spell.

    Args:
        book: the text.
        share: of the book before the passage, from 0 to 1.
        length: the number of words.
    Returns:
        The words with single spaces between them.
    Raises:
        ValueError: there is no such passage.
    Example:
        >>> passage("Chapter 1. All went well. Nobody spoke.", 0.2, 3)
        'All went well.'
    """
    for start in re.finditer(r"(?<=[.?!])\s+(?=[A-Z])", book[round(share * len(book)) :]):
        following = book[round(share * len(book)) + start.end() :][: 20 * length].split()[:length]
        found = " ".join(following)
        has_name_or_dash = re.search(r"(?<![.?!]) (?!I\b)[A-Z]|--", found)
        if len(following) == length and not has_name_or_dash and re.fullmatch(r"[A-Za-z ,.;:?!'\u2019-]+", found):
            return found
    raise ValueError(f"the book has no passage of {length} plain words after {share:.0%} of it; give another text")


def _spoken(text: str, voice: str) -> Clip:
    key = hashlib.sha256(f"{voice}\n{text}".encode()).hexdigest()[:16]
    path = cache_folder() / "speech" / f"{key}.wav"
    if not path.exists():
        program = shutil.which("espeak-ng")
        if program is None:
            raise FileNotFoundError("espeak-ng is not installed; on Debian: apt-get install espeak-ng")
        done = subprocess.run([program, "-v", voice, "-s", str(A_MINUTE), "--stdout", text], capture_output=True)
        if done.returncode or not done.stdout:
            raise RuntimeError(f"espeak-ng could not speak with the voice {voice}: {done.stderr.decode()[:200]}")
        replace_file(path.with_suffix(".txt"), text.encode())
        replace_file(path, done.stdout)
    return Clip(path, text)


def words(text: str) -> list[str]:
    """The words of a text as Whisper's authors compare them: lower case, no punctuation, digits for numbers.

    Args:
        text: any text.
    Returns:
        Its words.
    Example:
        >>> words("It wasn't ninety, he said -- Light!")
        ['it', 'was', 'not', '90', 'he', 'said', 'light']
    """
    found = _normalizer()(text.replace("\u2019", "'")).split()
    return [word for word in found if any(map(str.isalnum, word))]


@cache
def _normalizer() -> Callable[[str], str]:
    from transformers.models.whisper import english_normalizer

    library: Any = english_normalizer  # it has no types
    normalize: Callable[[str], str] = library.EnglishTextNormalizer({})
    return normalize


def word_error_rate(said: str, heard: str) -> float:
    """The fewest words to change, insert or delete that make `said` into `heard`, as a share of the words of `said`.

    Args:
        said: the text of the clip.
        heard: its transcript.
    Returns:
        0 where all words are equal; it may be above 1.
    Raises:
        ValueError: `said` has no words.
    Example:
        >>> word_error_rate("the best of times", "the rest of the times")
        0.5
    """
    reference, transcript = words(said), words(heard)
    if not reference:
        raise ValueError("the text has no words; expected what is said in the clip")
    row = list(range(len(transcript) + 1))  # the changes from the first words of one text to those of the other
    for i, word in enumerate(reference, 1):
        previous, row = row, [i]
        for j, other in enumerate(transcript, 1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (word != other)))
    return row[-1] / len(reference)
