"""Records in, one self-contained HTML page out: tables, pictures, what they show, and how they were made."""

from skeinformer.lab.report.demo import summary, write_figure
from skeinformer.lab.report.format import label, number, seconds, size, spread
from skeinformer.lab.report.sections import write_report

__all__ = ["label", "number", "seconds", "size", "spread", "summary", "write_figure", "write_report"]
