"""The Long Range Arena: data, training and tables. `python -m lra` is its command line."""
