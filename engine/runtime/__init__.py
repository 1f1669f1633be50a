"""The runtime: everything between a step plan and the tokens it drew.

Owns: the executor, its input buffers, and the sampler with its random numbers and filters. Knows nothing of queues.
"""
