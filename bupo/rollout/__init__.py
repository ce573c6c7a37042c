"""Decoding in lockstep and playing many dialogues at once."""
