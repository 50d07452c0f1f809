"""Clips of speech with their texts, and the share of words that a transcript has wrong."""

import re
from pathlib import Path

from benchmarks.models.packages import data_file

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


def words(text: str) -> list[str]:
    """The words of a text in lower case without punctuation.

    Args:
        text: any text.
    Returns:
        Its words; an apostrophe inside of a word is left out.
    Example:
        >>> words("It wasn't, he said -- Light!")
        ['it', 'wasnt', 'he', 'said', 'light']
    """
    return re.findall(r"[^\W_]+", re.sub(r"['\u2019]", "", text.lower()))


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
