"""Rollouts of reinforcement learning with an environment: agents of the user's own, which call the
model for several turns, and environments that have no agent.

    POST to the agent ──▶ it calls /v1/rollouts/<id>/chat/completions ──▶ {"reward": …}
    (endpoint.py)         (open_rollouts.py records the tokens)
    MCP tools, OpenEnv ◀──▶ playing.py ◀──▶ the preview

open_rollouts    rollouts that are open: their keys, budgets and recorded calls
running          several rollouts at once, and how each has ended
addresses        which servers may be asked, and what signs the requests
counterparts     a job's environment as what its rollouts are run with
endpoint         the request that begins a rollout of an agent, and the reward that ends it
playing          turns between the model and an environment without agent
mcp_tools        the tools of an MCP server as such an environment
open_env         an environment of OpenEnv
shown_text       what the model reads of an environment's answer
hosting          a Python function as an agent (`ft rollout serve`); its requests: rollout_handler
"""
