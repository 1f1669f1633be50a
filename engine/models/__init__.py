"""One lean decoder for the Llama, Mistral, Qwen2, Qwen3, SmolLM2 and SmolLM3 families, and the layout of its
weights."""
