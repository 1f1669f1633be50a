"""One generation engine in one process, usable alone: `Engine.from_pretrained(dir).run_batch(prompts, params)`."""
