"""Measurement: pretrained queries, keys and values; time, memory and error of a method on them. Needs extra `lab`."""
