"""TabPFN v1: a transformer that classifies the rows of a table by attending to rows with known classes.

A row is one token, without a position. Training rows attend to each other, in `nn.MultiheadAttention`, which
`skeinformer.convert` takes. Test rows attend to the training rows only, with the same weights, and always exactly.
The layers normalise after each residual. Widths are those of the published weights.
"""

import pickle
import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.packages import data_file

LAYERS, HEADS, WIDTH, HIDDEN = 12, 4, 512, 1024
FEATURES, CLASSES = 100, 10
TEMPERATURE = 0.8  # the logits are divided by it
OUTLIER = 4.0  # standard deviations
# what torch.load and taking the first entry raise where the file is another
DAMAGE = (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile, LookupError, AttributeError, TypeError)
# the checkpoint's names and ours
NAMES = {"module.": "", "transformer_encoder.layers.": "layers.", "self_attn.": "attention."}


class Layer(nn.Module):
    """Attention and two linear layers, for training rows (n, b, width) and test rows (m, b, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)
        self.linear1, self.linear2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
        of_train = self.attention(train, train, train, need_weights=False)[0]
        return self._rest(train + of_train), self._rest(test + self._attend_exactly(test, train))

    def _attend_exactly(self, test: Tensor, train: Tensor) -> Tensor:
        x, projection = self.attention, self.attention.out_proj
        # the function, not the module: convert changes the module
        return F.multi_head_attention_forward(
            *(test, train, train, WIDTH, HEADS, x.in_proj_weight, x.in_proj_bias, None, None, False, 0.0),
            *(projection.weight, projection.bias),
            need_weights=False,
        )[0]

    def _rest(self, x: Tensor) -> Tensor:
        x = self.norm1(x)
        output: Tensor = self.norm2(x + self.linear2(F.gelu(self.linear1(x))))
        return output


class TabPFN(nn.Module):
    """Logits of the classes of test rows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.y_encoder = nn.Linear(FEATURES, WIDTH), nn.Linear(1, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.decoder = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, CLASSES))

    def forward(self, x_train: Tensor, y_train: Tensor, x_test: Tensor) -> Tensor:
        """Args: features (n, b, 100) and classes (n, b) of training rows, features (m, b, 100): (m, b, 10)."""
        train = self.encoder(x_train) + self.y_encoder(y_train[..., None])
        test = self.encoder(x_test)
        for layer in self.layers:
            train, test = layer(train, test)
        logits: Tensor = self.decoder(test)
        return logits


def load_tabpfn() -> TabPFN:
    """TabPFN v1 in float32 and evaluation mode, from the cache.

    Returns:
        The model.
    Raises:
        FileNotFoundError: the weights have not been fetched.
        ValueError: the file of the weights is damaged.
    Example:
        >>> probabilities = predict(load_tabpfn(), x_train, y_train, x_test)  # doctest: +SKIP
    """
    path = data_file("tabpfn", "prior_diff_real_checkpoint_n_0_epoch_42.cpkt")
    model = TabPFN()
    try:
        model.load_state_dict(read_checkpoint(path))
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {error}") from error
    return model.requires_grad_(False).eval()


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint under our names.

    The checkpoint is a pickle. torch reads it with `weights_only`: it makes tensors and containers, and nothing else.

    Args:
        path: the checkpoint: a tuple whose first entry is a state dict.
    Returns:
        Tensors by name.
    Raises:
        ValueError: it is another file, is damaged, or names anything that weights do not need.
    Example:
        >>> read_checkpoint(Path("checkpoint.cpkt"))["encoder.bias"].shape  # doctest: +SKIP
        torch.Size([512])
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        state = {name: tensor for name, tensor in content[0].items() if "criterion" not in name}
    except DAMAGE as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{path} is not a checkpoint of TabPFN: {reason}") from None
    for theirs, ours in NAMES.items():
        state = {name.replace(theirs, ours): tensor for name, tensor in state.items()}
    return state


def prepare(x_train: ArrayLike, x_test: ArrayLike) -> tuple[Tensor, Tensor]:
    """Features as the model takes them, by means and deviations of the training rows.

    A feature with one value is left out. The others are centred and scaled, and what is beyond four deviations is drawn
    in to a logarithm. All are scaled by 100 / features, and zeros make up 100.

    Args:
        x_train: (n, features), finite.
        x_test: (m, features), finite.
    Returns:
        (n, 1, 100) and (m, 1, 100) in float32.
    Raises:
        ValueError: the shapes do not fit, there are more than 100 features, or a value is not finite.
    Example:
        >>> prepare(np.random.rand(20, 3), np.random.rand(5, 3))[1].shape
        torch.Size([5, 1, 100])
    """
    train, test = np.asarray(x_train, np.float64), np.asarray(x_test, np.float64)
    if train.ndim != 2 or test.ndim != 2 or train.shape[1] != test.shape[1] or train.shape[1] > FEATURES:
        raise ValueError(
            f"x_train and x_test have the shapes {train.shape} and {test.shape}, expected (rows, features), "
            f"with the same features in both, at most {FEATURES}"
        )
    if not (np.isfinite(train).all() and np.isfinite(test).all()):
        raise ValueError("x_train or x_test has values that are not finite; fill them in or leave these rows out")
    varies = (train != train[:1]).any(0)
    mean, deviation = train[:, varies].mean(0), train[:, varies].std(0, ddof=1)
    rows = (np.vstack([train, test])[:, varies] - mean) / (deviation + 1e-6)
    rows = _draw_in(np.clip(rows, -100, 100), len(train)) * (FEATURES / max(1, varies.sum()))
    padded = torch.zeros(len(rows), 1, FEATURES)
    padded[:, 0, : rows.shape[1]] = torch.from_numpy(rows)
    return padded[: len(train)], padded[len(train) :]


def _draw_in(rows: NDArray[np.float64], num_train: int) -> NDArray[np.float64]:
    """Bound each feature softly, at four deviations of those training rows that are within four deviations."""
    train = rows[:num_train]
    inner = np.abs(train - train.mean(0)) <= OUTLIER * train.std(0, ddof=1)
    mean, deviation = train.mean(0, where=inner), train.std(0, ddof=1, where=inner)
    logs = np.log1p(np.abs(rows))
    raised: NDArray[np.float64] = np.maximum(rows, mean - OUTLIER * deviation - logs)
    # the second bound takes the logarithm of what the first has left
    lowered: NDArray[np.float64] = np.minimum(raised, mean + OUTLIER * deviation + np.log1p(np.abs(raised)))
    return lowered


@torch.no_grad()
def predict(model: TabPFN, x_train: ArrayLike, y_train: ArrayLike, x_test: ArrayLike) -> NDArray[np.float32]:
    """Probabilities of the classes of test rows, in one pass without an ensemble.

    Args:
        model: a loaded model; it may be converted.
        x_train: (n, features), at most 100.
        y_train: (n,), at most ten different classes.
        x_test: (m, features).
    Returns:
        (m, classes), in the order of the sorted classes.
    Raises:
        ValueError: the shapes do not fit, a value is not finite, or there are too many features or classes.
    Example:
        >>> predict(load_tabpfn(), x_train, y_train, x_test).argmax(1)  # doctest: +SKIP
    """
    classes, indices = np.unique(np.asarray(y_train), return_inverse=True)
    train, test = prepare(x_train, x_test)
    if len(indices) != len(train) or not 1 < len(classes) <= CLASSES:
        raise ValueError(
            f"y_train has {len(indices)} rows of {len(classes)} classes, "
            f"expected {len(train)} rows of two to {CLASSES} classes"
        )
    logits = model(train, torch.from_numpy(indices.astype(np.float32))[:, None], test)[:, 0, : len(classes)]
    return np.asarray(torch.softmax(logits / TEMPERATURE, -1))
