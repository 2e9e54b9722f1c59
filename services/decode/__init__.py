"""Fetches blocks, replays the suffix, samples and streams tokens, many sequences in a step."""
