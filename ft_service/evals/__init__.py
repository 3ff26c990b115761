"""OpenAI's evals: criteria for answers, runs in which a model answers items, and what came of it.
Pure.

eval_request   bodies: an eval, its criteria, a run with its items and messages
item_schema    the JSON schema of an eval's items
item_results   a criterion passed or failed, an item's status, the counts of a run

control/eval_runs.py carries runs out; store/evals.py keeps them.
"""
