"""Rollouts: tasks and rewards, the processes that make samples, and the trainer's view of them.

`Prompt`, `Task` and `Reward` are what a user's own task file needs; nothing here loads torch for them.
"""

from .prompts import Prompt
from .rewards import Reward
from .task import Task

__all__ = ["Prompt", "Reward", "Task"]
