"""What every test stands on: the leak check, the real model, the account of behaviours, and fixed seeds."""

from __future__ import annotations

import os

from hypothesis import settings

pytest_plugins = ["harness.leaks", "harness.real_model", "harness.behaviours", "harness.training_inputs"]

# Examples are the same in every run, so that a red test is red for everybody. HYPOTHESIS_PROFILE=explore looks further,
# and `fast`, which `bin/test --fast` takes, at the first fifth.
settings.register_profile("fixed", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("fast", settings.get_profile("fixed"), max_examples=20)
settings.register_profile("explore", derandomize=False, deadline=None, database=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
