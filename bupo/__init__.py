"""bupo: K LoRA sub-policies in one frozen language model, mixed at every token and trained by PPO."""

__version__ = "0.1.0"
