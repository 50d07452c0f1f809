"""The Long Range Arena's five tasks: readers of their official files, generators, and the store that training reads."""
