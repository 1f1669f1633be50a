"""bin/bench: the engine's speed beside transformers' `generate`, as ratios taken in one run."""
