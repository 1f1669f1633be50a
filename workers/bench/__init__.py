"""bin/bench: the engine's speed beside its peers, and what lies around it, as ratios taken in one run."""
