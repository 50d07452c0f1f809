"""Measurements that pages of docs/ rest on. Not installed: `python -m studies.NAME` from a checkout."""
