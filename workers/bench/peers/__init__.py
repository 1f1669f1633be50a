"""What runs inside a contender's own process: one driver per engine, which may have another Python than the bench.

Nothing here but `unison` imports Unison, so a driver needs only its own packages and the standard library.
"""
