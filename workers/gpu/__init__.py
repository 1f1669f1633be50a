"""The GPU worker: one engine, one arena, one channel, one loop (a CPU process where there is no GPU)."""
