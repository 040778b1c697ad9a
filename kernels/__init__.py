"""Triton kernels, each with its torch reference: the package megarl.kernels."""

if __name__ != "megarl.kernels":  # SGLang means a PyPI package by `kernels`, not this folder in the current directory
    raise ImportError("the folder kernels/ of MegaRL is the package megarl.kernels; start Python with -P to keep it off sys.path")
