"""Trains the demo checkpoint: the architecture of DeepSeek-V4.1-Flash at about twelve million parameters.

`python -m tools.train_demo --help`, from the repository root, lists the steps; docs/demo.md tells why each is as it is.
Nothing here is installed: the checkpoint and its evaluation set are.
"""
