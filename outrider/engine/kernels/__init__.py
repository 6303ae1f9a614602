"""Kernels: Triton for CUDA, imported only if a CUDA device is used; compiled C++ for CPUs under cpu."""
