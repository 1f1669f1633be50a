"""The weight arena: flat buffers of weights that trainer and engine map, so that an update is a flip and not a copy.

The only part of `ipc` that needs torch, and only where tensors are asked for.
"""
