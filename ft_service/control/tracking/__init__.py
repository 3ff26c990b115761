"""Metrics of jobs with `integrations`, sent to Weights & Biases, MLflow and trackio.

integration_check   whether this server can serve a job's integrations
metric_points       what is sent, and when a failed request is repeated: pure
metric_sender       reads the stored metrics of each such job and passes them to a process of their
                    own
__main__            that process, one per run, since a tracker's package starts threads and
                    processes
wandb_run           a run of W&B, by its SDK; mlflow_run and trackio_run: the same for MLflow and
                    trackio

The database keeps where a run is and whether everything has arrived. The tracker tells which step
comes next: whenever a run is opened, it names the last step that it has.
"""
