"""Runs the encoder half over prompts and puts the finished blocks into the store."""
