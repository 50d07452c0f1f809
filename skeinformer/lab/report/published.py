"""The figures that Chen et al. (2022) publish for the Long Range Arena: their Tables 1 to 4, as one table.

The paper ran on one Tesla V100 with 16 GB; accuracies are means over three runs, total times are of one.
"""

from typing import NamedTuple

# the tasks in the paper's order, as a reader calls them
TASKS = {"text": "Text", "listops": "ListOps", "retrieval": "Retrieval", "pathfinder": "Pathfinder", "image": "Image"}


class Figures(NamedTuple):
    """What the paper gives for one method on one task."""

    accuracy: float  # Table 1: of the test set, percent
    steps: int  # Table 2: training steps, thousands
    minutes_per_thousand: int  # Table 2: training time per thousand steps
    accumulation: int  # Tables 2 and 4: micro-batches of one step
    exact_steps: float  # Table 3: training steps, thousands
    minutes: float  # Table 3: total training time
    micro_batch: int  # Table 4: examples


class Published(NamedTuple):
    """A row of the paper's tables."""

    name: str  # as the paper has it
    average: float  # Table 1
    tasks: dict[str, Figures]


PUBLISHED: dict[str, Published] = {
    "softmax_dropout": Published(
        "Standard",
        57.50,
        {
            "text": Figures(57.69, 11, 51, 8, 10.67, 540.00, 16),
            "listops": Figures(38.15, 9, 22, 4, 8.53, 190.29, 64),
            "retrieval": Figures(80.10, 20, 53, 4, 19.80, 1054.67, 16),
            "pathfinder": Figures(73.59, 21, 14, 4, 21.40, 297.78, 128),
            "image": Figures(37.97, 4, 21, 4, 4.33, 92.73, 64),
        },
    ),
    "softmax": Published(
        "Standard w/o dropout",
        57.38,
        {
            "text": Figures(59.44, 6, 39, 16, 5.67, 223.79, 8),
            "listops": Figures(38.17, 6, 20, 8, 5.58, 108.90, 32),
            "retrieval": Figures(79.35, 16, 42, 8, 16.30, 682.72, 8),
            "pathfinder": Figures(72.35, 18, 12, 8, 17.58, 207.14, 64),
            "image": Figures(37.58, 4, 15, 8, 4.23, 63.01, 32),
        },
    ),
    "vmean": Published(
        "V-mean",
        53.98,
        {
            "text": Figures(65.29, 8, 4, 1, 8.00, 28.92, 128),
            "listops": Figures(28.78, 10, 4, 1, 9.77, 40.46, 256),
            "retrieval": Figures(80.49, 27, 4, 1, 26.50, 103.41, 64),
            "pathfinder": Figures(61.01, 16, 4, 1, 15.60, 57.27, 512),
            "image": Figures(34.33, 7, 4, 1, 7.38, 32.77, 256),
        },
    ),
    "bigbird": Published(
        "BigBird",
        57.45,
        {
            "text": Figures(61.91, 6, 21, 2, 6.00, 123.52, 64),
            "listops": Figures(38.86, 9, 17, 2, 9.07, 156.68, 128),
            "retrieval": Figures(79.73, 15, 22, 2, 14.90, 323.83, 32),
            "pathfinder": Figures(71.75, 17, 18, 2, 17.47, 311.40, 256),
            "image": Figures(35.00, 3, 19, 1, 3.20, 60.28, 256),
        },
    ),
    "performer": Published(
        "Performer",
        52.99,
        {
            "text": Figures(57.67, 30, 3, 2, 30.33, 79.64, 64),
            "listops": Figures(37.70, 10, 9, 2, 9.90, 92.14, 128),
            "retrieval": Figures(75.69, 13, 12, 2, 12.50, 156.22, 32),
            "pathfinder": Figures(56.50, 9, 10, 2, 8.83, 91.91, 256),
            "image": Figures(37.40, 5, 9, 1, 5.13, 45.87, 256),
        },
    ),
    "nystromformer": Published(
        "Nystromformer",
        56.60,
        {
            "text": Figures(60.91, 12, 12, 2, 11.50, 140.02, 64),
            "listops": Figures(37.76, 10, 12, 2, 9.87, 121.19, 128),
            "retrieval": Figures(79.87, 17, 13, 2, 17.10, 228.26, 32),
            "pathfinder": Figures(72.53, 23, 20, 4, 22.60, 442.59, 128),
            "image": Figures(31.93, 3, 10, 1, 2.92, 30.06, 256),
        },
    ),
    "reformer": Published(
        "Reformer",
        57.02,
        {
            "text": Figures(62.69, 7, 11, 2, 6.67, 70.17, 64),
            "listops": Figures(37.94, 14, 8, 2, 14.20, 117.55, 128),
            "retrieval": Figures(78.85, 26, 11, 1, 26.40, 297.59, 64),
            "pathfinder": Figures(69.21, 24, 9, 2, 24.13, 223.28, 256),
            "image": Figures(36.42, 5, 12, 1, 4.78, 56.84, 256),
        },
    ),
    "linformer": Published(
        "Linformer",
        53.39,
        {
            "text": Figures(58.52, 7, 8, 2, 6.50, 51.38, 64),
            "listops": Figures(37.97, 11, 6, 2, 11.43, 71.48, 128),
            "retrieval": Figures(77.40, 23, 8, 1, 23.20, 187.51, 64),
            "pathfinder": Figures(55.57, 7, 7, 2, 7.30, 50.35, 256),
            "image": Figures(37.48, 4, 7, 1, 4.25, 28.27, 256),
        },
    ),
    "linformer_jlt": Published(
        "Linformer w/ unreduced JLT",
        56.08,
        {
            "text": Figures(59.12, 6, 37, 16, 6.25, 230.46, 8),
            "listops": Figures(37.48, 4, 21, 8, 3.98, 85.43, 32),
            "retrieval": Figures(79.39, 24, 36, 16, 23.85, 856.83, 4),
            "pathfinder": Figures(68.45, 12, 15, 4, 12.01, 182.18, 128),
            "image": Figures(35.96, 4, 22, 2, 4.30, 94.75, 128),
        },
    ),
    "informer": Published(
        "Informer",
        55.35,
        {
            "text": Figures(61.55, 8, 33, 8, 8.00, 265.06, 16),
            "listops": Figures(38.43, 10, 22, 8, 10.13, 221.79, 32),
            "retrieval": Figures(80.88, 25, 37, 4, 24.70, 901.99, 16),
            "pathfinder": Figures(59.34, 9, 26, 8, 9.47, 247.50, 64),
            "image": Figures(36.55, 7, 25, 2, 6.72, 167.37, 128),
        },
    ),
    "informer_mask": Published(
        "Informer w/ padding mask",
        55.57,
        {
            "text": Figures(60.98, 7, 26, 4, 7.00, 181.61, 32),
            "listops": Figures(37.26, 4, 22, 4, 4.20, 90.31, 64),
            "retrieval": Figures(79.92, 31, 36, 2, 30.90, 1110.98, 32),
            "pathfinder": Figures(62.51, 7, 16, 4, 7.02, 110.83, 128),
            "image": Figures(37.19, 5, 23, 2, 5.10, 115.14, 128),
        },
    ),
    "skeinformer": Published(
        "Skeinformer",
        58.08,
        {
            "text": Figures(62.47, 6, 10, 2, 6.17, 59.23, 64),
            "listops": Figures(38.73, 7, 10, 2, 7.32, 70.71, 128),
            "retrieval": Figures(80.42, 20, 11, 1, 20.40, 216.36, 64),
            "pathfinder": Figures(71.51, 18, 9, 2, 17.89, 165.54, 256),
            "image": Figures(37.27, 6, 12, 1, 5.57, 66.02, 256),
        },
    ),
    "skeinformer_uniform": Published(
        "Skeinformer w/ uniform sampling",
        55.28,
        {
            "text": Figures(64.48, 8, 8, 1, 8.00, 60.79, 128),
            "listops": Figures(30.02, 3, 7, 1, 3.20, 21.30, 256),
            "retrieval": Figures(80.57, 26, 7, 1, 26.10, 174.96, 64),
            "pathfinder": Figures(64.35, 19, 7, 1, 18.72, 136.05, 512),
            "image": Figures(36.97, 8, 8, 1, 7.67, 59.52, 256),
        },
    ),
    "skeinformer_no_norm": Published(
        "Skeinformer w/o row normalization",
        56.09,
        {
            "text": Figures(60.67, 6, 25, 8, 6.17, 154.31, 16),
            "listops": Figures(37.69, 6, 16, 4, 5.90, 94.54, 64),
            "retrieval": Figures(78.67, 14, 56, 16, 13.80, 768.97, 4),
            "pathfinder": Figures(66.35, 13, 11, 2, 13.21, 146.88, 256),
            "image": Figures(37.06, 5, 16, 2, 4.50, 69.83, 128),
        },
    ),
    "skeinformer_simple_norm": Published(
        "Skeinformer w/ simple row normalization",
        56.54,
        {
            "text": Figures(60.26, 7, 7, 1, 6.67, 45.32, 128),
            "listops": Figures(38.35, 6, 8, 1, 6.27, 51.12, 256),
            "retrieval": Figures(78.97, 19, 8, 1, 19.30, 155.07, 64),
            "pathfinder": Figures(65.41, 14, 7, 1, 13.62, 93.19, 512),
            "image": Figures(39.72, 6, 11, 1, 5.78, 65.17, 256),
        },
    ),
    "skeinformer_no_reuse": Published(
        "Skeinformer w/o pilot sampling reutilization",
        57.83,
        {
            "text": Figures(62.39, 7, 7, 1, 6.50, 46.47, 128),
            "listops": Figures(38.12, 6, 7, 1, 6.25, 45.68, 256),
            "retrieval": Figures(79.88, 22, 9, 1, 22.20, 192.69, 64),
            "pathfinder": Figures(71.53, 17, 7, 1, 16.64, 117.99, 512),
            "image": Figures(37.20, 6, 10, 1, 6.23, 63.51, 256),
        },
    ),
}
