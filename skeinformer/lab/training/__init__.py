"""Training on the Long Range Arena: recipes, one loop, checkpoints, memory."""
