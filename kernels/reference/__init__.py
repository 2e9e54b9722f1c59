"""The ops in plain PyTorch: the definition of right for every other backend."""
