"""Kernels: the arithmetic of the decoder, each native code beside its torch reference."""
