"""Bases, chat format, the policy pool and its lockstep forward."""
