"""SFT, advantages, objectives and the PPO update."""
