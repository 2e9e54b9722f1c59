"""The ops on NVIDIA Hopper, one file for each, written in TileLang.

Importing a module needs neither TileLang nor a GPU: both are asked for when a kernel is first built.
"""
