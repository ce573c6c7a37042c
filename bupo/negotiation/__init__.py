"""The negotiation world: scenarios, mechanism, prompts, scripted players, reward."""
