"""Verification of stored samples from outside: weights by digest, the forward pass, the draws, prompt, text, reward."""
