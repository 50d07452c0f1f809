"""The measurements behind the numbers of the documentation. They are not installed: `python -m benchmarks.NAME`."""
