"""The ops of the device model: contracts, and their twins in plain PyTorch.

One module for each family. A twin runs on any device, is built on `kernels.reference`, and defines what the kernel of
the same name in `kernels.tilelang` must compute. Activations are bf16 between ops and fp32 inside.
"""
