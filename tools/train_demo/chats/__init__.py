"""Synthetic conversations: what they are about, how they are drawn, how they become tokens."""
