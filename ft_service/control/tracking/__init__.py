"""The metrics of jobs with `integrations`, sent to Weights & Biases, MLflow and trackio.

door        whether a job may ask for it here
points      what is sent, and when what goes wrong is tried again: pure
sender      the stored metrics of jobs, each step once, into their runs
wandb_run   one run, by W&B's own SDK; mlflow_run and trackio_run the same by theirs
keeper      keeps the process that does it, beside the server
__main__    that process: the SDK starts processes and threads, and is not for a server's

What the database keeps is only where a run is and whether all is there. Which step comes next is the tracker's to say: whenever
a run is opened, after whatever end of the process before, it names the last one that it has.
"""
