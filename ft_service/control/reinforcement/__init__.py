"""Jobs of reinforcement learning: their answers, grades and commands."""
