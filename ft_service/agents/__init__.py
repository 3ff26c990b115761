"""Agents of the user's own, which call the model for several turns: rollouts of reinforcement
learning with an environment.

    POST to the agent ──▶ it calls /v1/rollouts/<id>/chat/completions ──▶ {"reward": …}
    (endpoint.py)         (open_rollouts.py records the tokens)

open_rollouts    rollouts that are open: their keys, budgets and recorded calls
endpoint         the request that begins a rollout, and the reward that ends it
hosting          a Python function as such an agent (`ft rollout serve`)
"""
