"""What trains: torchrun starts `python -m workers.train RUN_DIR ATTEMPT` on every rank."""
