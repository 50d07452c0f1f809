"""Data of the five tasks: readers of the official files, generators, and the store that training reads."""
