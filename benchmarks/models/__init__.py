"""Pretrained models whose weights come as Python packages: MiniLM, Whisper base and TabPFN v1. See README.md here."""
